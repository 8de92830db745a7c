"""Deployment: the one frozen description of what is served; every default stands here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from dflash_serve.common.settings import ENV_PREFIX, Frozen, PositiveInt, merged_settings

__all__ = ["ENV_PREFIX"]
OTHER_VARIABLES = ("API_KEY", "COST_TABLE", "SURVIVAL")
"""Variables of ours that are no keys: what clients send, and what widths may be chosen by."""
GIB = 1 << 30
PER_NODE = 8
"""Most GPUs of one node; NVL72 racks are reached as several nodes."""

Quantization = Literal["none", "fp8", "nvfp4", "mxfp4"]


def _width(width: object) -> object:
    number = int(width) if isinstance(width, str) and width.isdecimal() else width
    if number in ("auto", "off") or (isinstance(number, int) and number >= 1):
        return number
    raise ValueError("a width is a number of slots from 1 on (1 = the anchor alone), `auto` or `off`")


def _text_keys(value: object) -> object:
    """YAML's {4: 15} as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(inner) for key, inner in value.items()}
    return value


EngineArgsOfBackends = Annotated[dict[str, dict[str, JsonValue]], BeforeValidator(_text_keys)]
Width = Annotated[int | Literal["auto", "off"], BeforeValidator(_width)]
"""Slots verified a step, the anchor counted: a number, `auto` (what pays by measured cost), or `off`."""


class Model(Frozen):
    """A model by hub id, local folder or bundled alias."""

    model: str
    """Hub id (`Qwen/Qwen3-8B`), local folder, or `smollm2`, the bundled pair; a drafter may be `auto`, the best that is
    published for target and engine (`dflash-serve drafters`)."""
    revision: str | None = None
    """A commit of the hub repository; checkpoints are replaced in place there, so pin it."""
    quantization: Quantization = "none"
    """Number format to serve the weights in; none = as the checkpoint has them. SGLang and vLLM make fp8 of a target's
    bf16 weights while loading; another format, or a drafter's, must be the checkpoint's own (`dflash-serve build`)."""


class Speculation(Frozen):
    """How the drafter is used."""

    block_size: Annotated[int, Field(ge=2)] | None = None
    """B, the anchor counted; None = the checkpoint's own. Smaller serves a wide drafter narrower; larger is refused."""
    width: Width = "auto"
    """Slots verified a step, the anchor counted: a number, `auto` (what pays by measured cost), or `off`."""
    draft_window: PositiveInt | None = None
    """The drafter sees only this many last tokens of the context; None = all of it, or what it was trained with."""


class Parallel(Frozen):
    """How the model is spread over devices."""

    tensor: PositiveInt = 1
    """GPUs that share every layer (tensor parallelism), on all nodes together."""
    data: PositiveInt = 1
    """Copies of the whole model, each on GPUs of its own, that share out the requests; SGLang has them in one server,
    other engines as replicas (`dflash-serve deploy`)."""
    expert: PositiveInt = 1
    """How many of the tensor-parallel devices share out the experts instead of slicing them."""
    pipeline: PositiveInt = 1
    """Groups of GPUs that each hold a share of the layers (pipeline parallelism); 1 = every GPU has all of them."""
    context: PositiveInt = 1
    """Devices that share one sequence (context parallelism; TensorRT-LLM: Helix)."""
    attention_data: bool = False
    """Attention runs data-parallel: each device holds all of it, for requests of its own."""
    nodes: PositiveInt = 1
    """Machines that one server spans; its GPUs are shared evenly among them."""


class Limits(Frozen):
    """What one server takes on."""

    max_batch_size: PositiveInt | None = None
    """Requests that run at the same time; further ones wait in the queue. None = the engine's own choice, or what its
    memory holds; `dflash-serve serve --dry-run` says which number that is."""
    max_model_len: PositiveInt | None = None
    """Tokens of prompt and answer together; None = what the target was made for."""
    max_queued_requests: PositiveInt = 256
    """Requests that may wait for a place in the batch; beyond them new ones are refused at once. Not on TensorRT-LLM,
    which queues without bound and refuses the key."""
    max_num_tokens: PositiveInt | None = None
    """Rows in one step of the target, prompts and blocks together; None = the engine's own."""


class KVCacheSettings(Frozen):
    """The target's keys and values."""

    dtype: Literal["auto", "bfloat16", "fp8", "nvfp4"] = "auto"
    """auto = as the target's checkpoint says."""
    block_reuse: bool | None = None
    """Keep finished prompts' blocks for others (prefix caching); None = only where the drafter does not starve."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the free memory given to it; None = what the weights and the drafter's context leave."""


class Serving(Frozen):
    """What clients see of the server."""

    served_model_name: str | None = None
    """Name that clients use for the model; None = the target, as it is named here."""
    api_key_file: str | None = None
    """File of API keys, one a line (SGLang takes one); None = the server is open."""
    reasoning_parser: str | None = None
    """How thoughts are told from answers, by the model's family (`qwen3`, `deepseek-r1`, `gpt-oss`) or the engine's own
    name for it; None = they are not."""
    tool_call_parser: str | None = None
    """How tool calls are read from answers, by the model's family (`qwen3`, `qwen3_coder`, `gpt-oss`) or the engine's
    own name for it; None = they are not."""
    log_format: Literal["text", "json"] = "text"
    """json = one object a line, with time, level, logger and message; SGLang then leaves out one line a request. Not
    TensorRT-LLM."""
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+:\d+(/\S*)?$")] | None = None
    """Collector that is sent a trace of every request, by OTLP (`http://collector:4317`); None = nobody. Not the
    embedded engine."""


class Hardware(Frozen):
    """Where it runs."""

    gpu: Literal["none", "h100", "h200", "b200", "b300", "gb200", "gb300"] | None = None
    """Kind of GPU, checked for memory and number formats before launch; gb200 and gb300 stand beside a Grace (arm64,
    four on a node); `none` = a CPU, None = whatever is there."""
    count: PositiveInt = 1
    """GPUs that one server takes, on all its nodes together; `parallel` must come out at the same number."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of weights and K/V; auto = bfloat16 on a GPU. On a CPU vLLM takes float32, SGLang bfloat16, the
    embedded engine float32, or bfloat16 where the target's weights are and it is measured to be faster at start."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that a Deployment can name."""

    name: str
    memory: int
    """Bytes that a process finds free on an empty device."""
    compute: int
    """90 = SM90."""

    @property
    def is_blackwell(self) -> bool:
        """SM100 or SM103: has FP4 arithmetic and the trtllm-gen attention kernels."""
        return self.compute in (100, 103)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 79 * GIB, 90),
        Gpu("h200", 139 * GIB, 90),
        Gpu("b200", 178 * GIB, 100),
        Gpu("b300", 267 * GIB, 103),
        Gpu("gb200", 184 * GIB, 100),  # nvidia-smi: 189471 MiB
        Gpu("gb300", 276 * GIB, 103),  # nvidia-smi: 284208 MiB
    )
}


class Deployment(Frozen):
    """What is served."""

    target: Model
    drafter: Model | None = None
    """None = no speculation."""
    speculation: Speculation = Speculation()
    parallel: Parallel = Parallel()
    limits: Limits = Limits()
    kv_cache: KVCacheSettings = KVCacheSettings()
    hardware: Hardware = Hardware()
    serving: Serving = Serving()
    engine_args: EngineArgsOfBackends = Field(default={})
    """Arguments of an engine's own server, by backend: `{sglang: {mem-fraction-static: 0.9}}`. Handed on as they are,
    checked against the engine's own parser; one that another key stands for is refused."""
    role: Literal["whole", "prefill", "decode"] = "whole"
    """Prefill and decode are the halves of a disaggregated pair of servers."""


def load_deployment(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> Deployment:
    """Merges YAML, environment and flags: flag > environment (`DFLASH_SERVE_SPECULATION__WIDTH=off`) > YAML > default.

    Args:
        path: a YAML file, or None.
        flags: nested values given on the command line; None values count as not given.

    Raises:
        UserError: a file that cannot be read, an unknown key or an impossible value: the first one, and where it is.
    """
    return merged_settings(Deployment, path, flags or {}, start="target: {model: ...}", others=OTHER_VARIABLES)

"""Deployment: the frozen description of a server, with all defaults; how it is read, and variables beside it.

Priority of settings: flag > environment variable > YAML > default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from dflash_serve.common.settings import (
    Frozen,
    PositiveInt,
)
from dflash_serve.errors import UserError, did_you_mean

SECRET = re.compile(
    r"(^|[-_])((api|access|private|secret)[-_]?keys?|(api|access|auth|bearer|hf)[-_]?token|password|passwd|secret"
    r"|credentials?)$",
    re.IGNORECASE,
)
"""Names of arguments whose values are secrets."""
INSTEAD = {
    "api-key": "set serving.api_key_file",
    "admin-api-key": "leave it out, and set serving.api_key_file: its key opens SGLang's optional admin endpoints, too",
    "hf-token": "set HF_TOKEN in the server's environment",
    "ssl-keyfile-password": "use a key file without a password that only the server can read, or TLS at a gateway",
}
"""Name of a secret argument -> what to do instead."""
BACKENDS = ("sglang", "tensorrt-llm", "torch", "vllm")
"""Backends of this project, which a deployment may name where they are not installed."""
BACKEND_GROUP = "dflash_serve.backends"  # Entry points of the installed backends

Quantization = Literal["none", "fp8", "nvfp4", "mxfp4", "fp8-block", "int8", "w8a16", "w4a16"]


def _width(width: object) -> object:
    number = int(width) if isinstance(width, str) and width.isdecimal() else width
    if number in ("auto", "off") or (isinstance(number, int) and number >= 1):
        return number
    raise ValueError("a width is a number of slots from 1 on (1 = only the anchor), `auto` or `off`")


def _name(name: str) -> str:
    if not name.strip() or not name.isprintable() or name.startswith("-"):
        raise ValueError("a name is one line of visible characters, and begins with no dash")
    return name


def _text_keys(value: object) -> object:
    # YAML's {4: 15} -> JSON's {"4": 15}.
    if isinstance(value, Mapping):
        return {str(key): _text_keys(inner) for key, inner in value.items()}
    return value


def _known(backend: str) -> str:
    if backend in BACKENDS:
        return backend
    known = {*BACKENDS, *(point.name for point in entry_points(group=BACKEND_GROUP))}
    if backend not in known:
        hint = did_you_mean(backend, sorted(known)) or f"there are: {', '.join(sorted(known))}"
        raise ValueError(f"no backend of this name; {hint}")
    return backend


def _none_given(arguments: object) -> object:
    return {} if arguments is None else arguments  # `sglang:` with nothing below it


def _spelt_once(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    spellings = dict[str, str]()
    for name in given:
        first = spellings.setdefault(name.replace("_", "-"), name)
        if first != name:
            raise ValueError(f"{first} and {name} are one argument: leave one out")
    return given


EngineArgsOfBackends = Annotated[
    dict[
        Annotated[str, AfterValidator(_known)],
        Annotated[dict[str, JsonValue], BeforeValidator(_none_given), AfterValidator(_spelt_once)],
    ],
    BeforeValidator(_text_keys),
]
Count = Annotated[PositiveInt, Field(lt=2**31)]
"""A number of requests, tokens or devices; engines count them in 32 bits."""
Width = Annotated[int | Literal["auto", "off"], BeforeValidator(_width)]
"""Slots verified per step, with the anchor: a number, `auto` (chosen by measured cost), or `off`."""
GpuName = Annotated[
    Literal[
        "none",
        "a100",
        "l40s",
        "h100",
        "h200",
        "b200",
        "b300",
        "gb200",
        "gb300",
        "rtx-pro-6000",
        "rtx-5090",
        "rtx-6000d",
        "gb10",
    ],
    BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name),
]


class Model(Frozen):
    """A model by hub id, local folder or bundled alias."""

    model: str
    """Hub id (`Qwen/Qwen3-8B`), local folder, or `smollm2`, the bundled pair; `smollm2-dspark` is its drafter with a
    Markov head. A drafter may be `auto`: the best published one for target and engine (`dflash-serve drafters`)."""
    revision: str | None = None
    """A commit of the hub repository; checkpoints are replaced in place there, so pin it."""
    quantization: Quantization = "none"
    """Number format of the served weights; none = the checkpoint's. SGLang and vLLM convert a target's bf16 weights to
    fp8 while loading; any other format, and a drafter's, must be the checkpoint's own (`dflash-serve build` makes
    targets in fp8 and nvfp4). int8 is weights and activations, w8a16 and w4a16 integers of weights alone."""


class Speculation(Frozen):
    """Use of the drafter."""

    block_size: Annotated[Count, Field(ge=2)] | None = None
    """B, with the anchor; None = the checkpoint's. A smaller block is allowed; a larger one is refused."""
    width: Width = "auto"
    """Slots verified per step, with the anchor: a number, `auto` (chosen by measured cost), or `off`."""
    draft_window: Count | None = None
    """Number of last context tokens that the drafter sees; None = all, or the window that it was trained with."""


class Parallel(Frozen):
    """Distribution of the model over devices."""

    tensor: Count = 1
    """GPUs that share every layer (tensor parallelism), on all nodes together."""
    data: Count = 1
    """Copies of the whole model on separate GPUs, among which requests are distributed. SGLang has them in one server,
    other engines as replicas (`dflash-serve deploy`)."""
    expert: Count = 1
    """Number of tensor-parallel devices that hold whole experts instead of slices of all."""
    pipeline: Count = 1
    """Groups of GPUs that each hold a part of the layers (pipeline parallelism); 1 = every GPU has all layers."""
    context: Count = 1
    """Devices that share one sequence (context parallelism; TensorRT-LLM: Helix)."""
    attention_data: bool = False
    """Attention runs data-parallel: each device holds all of it, for its own requests."""
    nodes: Count = 1
    """Machines of one server, each with the same number of its GPUs."""


class Limits(Frozen):
    """Limits of the deployment."""

    max_batch_size: Count | None = None
    """Requests that run at the same time, on all copies of the model together (`parallel.data`): each copy takes an
    equal share. Further ones wait in the queue. None = the engine's default, or as many as its memory holds;
    `dflash-serve serve --dry-run` prints the number where it is known before the start."""
    max_model_len: Count | None = None
    """Tokens of prompt and answer together; None = the target's own limit."""
    max_queued_requests: Count = 256
    """Requests that may wait for a place in the batch of one copy of the model; further ones are refused at once. Not
    for TensorRT-LLM, whose queue has no limit, nor for halves of a pair on SGLang."""
    max_num_tokens: Count | None = None
    """Rows in one step of the target, prompts and blocks together; None = the engine's default."""


class KVCacheSettings(Frozen):
    """The target's keys and values."""

    dtype: Literal["auto", "bfloat16", "fp8", "nvfp4"] = "auto"
    """auto = the format that the target's checkpoint requests."""
    block_reuse: bool | None = None
    """Prefix caching: keep the blocks of finished prompts for later requests. None = only where the drafter then still
    gets the context features of the whole prompt."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the free memory for K/V; None = the memory that weights and the drafter's context leave."""


class Serving(Frozen):
    """The server as clients see it."""

    served_model_name: Annotated[str, AfterValidator(_name)] | None = None
    """Name of the model for clients; None = the target's name in this deployment."""
    api_key_file: str | None = None
    """File of API keys, one per line (SGLang takes one): every route but probes and metrics then wants a key. None = no
    key is needed."""
    reasoning_parser: str | None = None
    """Parser that separates reasoning from answers: the model's family (`qwen3`, `deepseek-r1`, `gpt-oss`) or the
    engine's own name; None = not separated."""
    tool_call_parser: str | None = None
    """Parser of tool calls in answers: the model's family (`qwen3`, `qwen3_coder`, `gpt-oss`) or the engine's own name;
    None = not parsed."""
    log_format: Literal["text", "json"] = "text"
    """json = one object per line, with time, level, logger and message; SGLang then omits its line for each request."""
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+:\d+(/\S*)?$")] | None = None
    """Collector that receives a trace of every request by OTLP (`http://collector:4317`); None = no traces."""


class Hardware(Frozen):
    """Hardware of the server."""

    gpu: GpuName | None = None
    """Kind of GPU, whose memory, number formats and kernels are checked before launch. gb200, gb300 and gb10 are beside
    a Grace CPU (arm64; four, four and one on a node); a100 is the one of 80 GB. `none` = a CPU; `auto` = the machine's
    own, by nvidia-smi; None = the machine's own, of which nothing is known before launch."""
    count: Count = 1
    """GPUs of one server on all its nodes together; must equal the product of the `parallel` sizes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights and K/V; auto = bfloat16 on a GPU. On a CPU vLLM takes float32 and SGLang bfloat16; the
    embedded engine takes bfloat16 if the target's weights are and it measures faster at start, else float32."""


class ServerHalf(Frozen):
    """One half of a pair: servers that only prefill, or only decode."""

    replicas: Count = 1
    """Servers of this half, each on GPUs of its own; `dflash-serve deploy` starts so many."""
    gpus: Count | None = None
    """GPUs of one server of this half; None = `hardware.count`. Another number changes `parallel.tensor` with it."""
    nodes: Count | None = None
    """Machines of one server of this half; None = `parallel.nodes`."""
    engine_args: EngineArgsOfBackends = Field(default={})
    """Arguments of this half alone, which replace those of the top level: `{sglang: {chunked-prefill-size: 8192}}`."""


class ServerPair(Frozen):
    """Prefill and decode on separate servers, both with the same target and drafter."""

    transfer: Literal["mooncake", "mooncake_tcp", "nixl"] | None = None
    """Way of the K/V from half to half; None = `mooncake` (RDMA) on SGLang, `nixl` on vLLM, which has no other here.
    `mooncake_tcp` and `nixl` need no RDMA."""
    prefill: ServerHalf = ServerHalf()
    """Servers that read prompts."""
    decode: ServerHalf = ServerHalf()
    """Servers that write answers."""


def _refuse_secrets(where: str, given: Any) -> None:
    if isinstance(given, list):
        given = dict(enumerate(given))
    for name, value in given.items() if isinstance(given, Mapping) else ():
        place = f"{where}.{name}"
        if SECRET.search(str(name)) and value is not None and not isinstance(value, bool):
            other = "leave it out, and give it to the engine by a file or a variable of its own"
            do = INSTEAD.get(str(name).replace("_", "-"), other)
            raise UserError("a secret here would be on a command line, which every user can read", where=place, do=do)
        _refuse_secrets(place, value)


class Deployment(Frozen):
    """A server: target, drafter, and how they are served."""

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
    """Arguments of an engine's own server, by backend: `{sglang: {mem-fraction-static: 0.9}}`. They are checked against
    the engine's own parser and passed on unchanged; secrets are refused, and arguments that another key sets."""
    role: Literal["whole", "prefill", "decode"] = "whole"
    """Half of a disaggregated pair that this server is; `dflash-serve serve --role` names it."""
    pair: ServerPair | None = None
    """None = one kind of server. Every half is checked against the other one before it starts."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_secrets(cls, given: Any) -> Any:
        """Runs before all else, and raises no ValueError: pydantic's messages show values."""
        if isinstance(given, Mapping):
            _refuse_secrets("engine_args", given.get("engine_args"))
            _refuse_secrets("pair", given.get("pair"))
        return given

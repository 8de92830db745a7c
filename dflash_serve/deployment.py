"""Deployment: the frozen description of a server, with all defaults; how it is read, and variables beside it.

Priority of settings: flag > environment variable > YAML > default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from dflash_serve.common.documents import CONFIG, TEXT, parse_json, read_text, read_yaml
from dflash_serve.common.settings import (
    ENV_PREFIX,
    NESTED,
    Frozen,
    PositiveInt,
    describe,
    fields_below,
    first_mistake,
    overlay,
    refuse_misspelt,
    without_nulls,
)
from dflash_serve.errors import UserError, did_you_mean, first_line

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel

COST_TABLE = f"{ENV_PREFIX}COST_TABLE"  # Environment variable: a JSON file of measured step costs
SURVIVAL = f"{ENV_PREFIX}SURVIVAL"
"""Environment variable: survival of slots 1, 2, ..., separated by commas (`doctor`, `verify` and `bench` measure it).
With a cost table, it gives the widths before launch: a table by batch size."""
OTHER_VARIABLES = ("API_KEY", "COST_TABLE", "SURVIVAL")  # Variables of ours that are not keys of a deployment
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
GIB = 1 << 30
BACKENDS = ("sglang", "tensorrt-llm", "torch", "vllm")
"""Backends of this project, which a deployment may name where they are not installed."""
BACKEND_GROUP = "dflash_serve.backends"  # Entry points of the installed backends
PER_NODE = 8
"""Largest number of GPUs in one node; an NVL72 rack counts as several nodes."""

Quantization = Literal["none", "fp8", "nvfp4", "mxfp4"]


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
    Literal["none", "h100", "h200", "b200", "b300", "gb200", "gb300"],
    BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name),
]


class Model(Frozen):
    """A model by hub id, local folder or bundled alias."""

    model: str
    """Hub id (`Qwen/Qwen3-8B`), local folder, or `smollm2`, the bundled pair. A drafter may be `auto`: the best
    published one for target and engine (`dflash-serve drafters`)."""
    revision: str | None = None
    """A commit of the hub repository; checkpoints are replaced in place there, so pin it."""
    quantization: Quantization = "none"
    """Number format of the served weights; none = the checkpoint's. SGLang and vLLM convert a target's bf16 weights to
    fp8 while loading; any other format, and a drafter's, must be the checkpoint's own (`dflash-serve build`)."""


class Speculation(Frozen):
    """Use of the drafter."""

    block_size: Annotated[Count, Field(ge=2)] | None = None
    """B, with the anchor; None = the checkpoint's. A smaller block is allowed; a larger one is refused."""
    width: Width = "auto"
    """Slots verified per step, with the anchor: a number, `auto` (chosen by measured cost), or `off`."""
    draft_window: Count | None = None
    """Number of last context tokens that the drafter sees; None = all, or the window that it was trained with.
    SGLang only."""


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
    key is needed. Not for TensorRT-LLM."""
    reasoning_parser: str | None = None
    """Parser that separates reasoning from answers: the model's family (`qwen3`, `deepseek-r1`, `gpt-oss`) or the
    engine's own name; None = not separated."""
    tool_call_parser: str | None = None
    """Parser of tool calls in answers: the model's family (`qwen3`, `qwen3_coder`, `gpt-oss`) or the engine's own name;
    None = not parsed."""
    log_format: Literal["text", "json"] = "text"
    """json = one object per line, with time, level, logger and message; SGLang then omits its line for each request.
    Not for TensorRT-LLM."""
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+:\d+(/\S*)?$")] | None = None
    """Collector that receives a trace of every request by OTLP (`http://collector:4317`); None = no traces. Not for the
    embedded engine."""


class Hardware(Frozen):
    """Hardware of the server."""

    gpu: GpuName | None = None
    """Kind of GPU, whose memory and number formats are checked before launch. gb200 and gb300 are beside a Grace CPU
    (arm64, four on a node); `none` = a CPU, None = the machine's own."""
    count: Count = 1
    """GPUs of one server on all its nodes together; must equal the product of the `parallel` sizes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights and K/V; auto = bfloat16 on a GPU. On a CPU vLLM takes float32 and SGLang bfloat16; the
    embedded engine takes bfloat16 if the target's weights are and it measures faster at start, else float32."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that a Deployment can name."""

    name: str
    memory: int
    """Bytes that are free for a process on an empty device."""
    compute: int
    """90 = SM90."""
    per_node: int = PER_NODE
    """Largest number of them in one node."""

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
        Gpu("gb200", 184 * GIB, 100, per_node=4),  # nvidia-smi: 189471 MiB
        Gpu("gb300", 276 * GIB, 103, per_node=4),  # nvidia-smi: 284208 MiB
    )
}


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
    """Prefill and decode are the halves of a disaggregated pair of servers. SGLang only."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_secrets(cls, given: Any) -> Any:
        """Runs before all else, and raises no ValueError: pydantic's messages show values."""
        _refuse_secrets("engine_args", given.get("engine_args") if isinstance(given, Mapping) else None)
        return given


def load_deployment(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> Deployment:
    """Merges YAML, environment and flags: flag > environment (`DFLASH_SERVE_SPECULATION__WIDTH=off`) > YAML > default.

    Args:
        path: a YAML file, or None.
        flags: nested values given on the command line; None values, and sections of them alone, count as not given.

    Raises:
        UserError: a file that cannot be read, an unknown key or an impossible value: the first one, and where it is.
    """
    if path is not None and path.is_dir():
        raise UserError("a folder, no deployment", where=str(path), do=f"give a deployment.yaml, or --target {path}")
    refuse_misspelt(ENV_PREFIX, {*_variables(), *OTHER_VARIABLES}, "names no key of the deployment")
    described = read_yaml(path) if path else {}
    if not isinstance(described, dict):
        raise UserError("not a mapping", where=str(path), do="start with `target: {model: ...}`")
    described, environment, given = (
        without_nulls(layer, Deployment.model_fields) for layer in (described, _environment(), flags or {})
    )
    given = {section: keys for section, keys in given.items() if keys != {}}
    merged = overlay({}, described)
    for layer in (environment, given):
        merged = overlay(merged, _spelt_as(merged, layer))
    try:
        return Deployment.model_validate(merged)
    except ValidationError as error:
        # The source of the first mistake: the layer of highest priority that has the key.
        place = [str(part) for part in first_mistake(error)["loc"] if part != "[key]"]
        where = str(path or "deployment")
        if _has(given, place):
            where = "command line"
        elif _has(environment, place):
            where = ENV_PREFIX + NESTED.join(place[:2]).upper()
        raise UserError(describe(error, Deployment), where=where) from None


def _environment() -> dict[str, Any]:
    config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=NESTED, extra="ignore")
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in Deployment.model_fields.items()}
    lender = create_model("Environment", __base__=BaseSettings, **fields)
    lender.model_config = SettingsConfigDict(**{**BaseSettings.model_config, **config})
    found: dict[str, Any] = _Variables(lender)()
    if isinstance(found.get("engine_args"), dict):  # the name of a variable has no dash
        found["engine_args"] = {name.replace("_", "-"): given for name, given in found["engine_args"].items()}
    return found


class _Variables(EnvSettingsSource):
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return parse_json(value, TEXT, where=field_name)
        except UserError as error:
            raise ValueError(error.what) from None

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError as error:
            variable = f"{ENV_PREFIX}{field_name}".upper()
            key = next(iter(fields_below(field) or ("sglang",))).upper()
            do = f"give JSON of the whole section, or one key: {variable}{NESTED}{key}=..."
            raise UserError(first_line(error), where=variable, do=do) from None


def _spelt_as(below: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """The layer with its `engine_args` in the spelling of the layers below, whose values it replaces."""

    def spelt(known: Any, given: Any) -> Any:
        if not isinstance(known, Mapping) or not isinstance(given, Mapping):
            return given
        names = {str(name).replace("_", "-"): name for name in known}
        return {names.get(str(name).replace("_", "-"), name): value for name, value in given.items()}

    own, others = layer.get("engine_args"), below.get("engine_args")
    if not isinstance(own, Mapping) or not isinstance(others, Mapping):
        return dict(layer)
    return {**layer, "engine_args": {name: spelt(others.get(name), given) for name, given in own.items()}}


def _variables() -> Iterator[str]:
    for name, field in Deployment.model_fields.items():
        yield name.upper()
        below = fields_below(field)
        yield from (f"{name}{NESTED}{key}".upper() for key in below or ())
        if below is None and "dict" in str(field.annotation):
            yield f"{name}{NESTED}".upper()


def _has(layer: Any, place: list[str]) -> bool:
    for part in place:
        if not isinstance(layer, Mapping):
            return True
        if part not in layer:
            return False
        layer = layer[part]
    return True


def given_cost(environment: Mapping[str, str] = os.environ) -> CostModel | None:
    """The user's cost table; None = not given.

    Raises:
        UserError: the file cannot be read or is not a cost table.
    """
    path = environment.get(COST_TABLE)
    if path is None:
        return None
    from dflash_serve.speculation.costs import CostModel  # numpy, which not every install has

    try:
        return CostModel.model_validate_json(read_text(Path(path), CONFIG))
    except (UserError, ValidationError) as error:
        do = "give seconds by rows (target) and by requests (draft), or leave it out"
        why = error.what if isinstance(error, UserError) else describe(error)
        raise UserError(f"no cost table ({why})", where=path, do=do) from None


def given_survival(environment: Mapping[str, str] = os.environ) -> tuple[float, ...] | None:
    """The user's survival; None = not given.

    Raises:
        UserError: the text is not a survival.
    """
    text = environment.get(SURVIVAL)
    if text is None:
        return None
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 >= early >= late >= 0 for early, late in zip((1.0, *found), found, strict=False)):
        do = "give each slot's share of accepted drafts, never rising, such as 0.63,0.35,0.2"
        raise UserError(f"{text!r} is no survival", where=SURVIVAL, do=do)
    return found

"""Quantisation of checkpoints, as their files declare it and as their tensors show it. No torch.

config.json declares it in `quantization_config`, ModelOpt also in `hf_quant_config.json` beside it. A target may use
any method, which its engine reads (`QuantizationRecipe`). Drafters are read in the formats of `storage.Format`, as
ModelOpt, compressed-tensors and Hugging Face's `fp8` write them (`Quantization`). ModelOpt 0.47 and `build` write both
files, in different shapes. The embedded engine reads plain targets, and dequantises drafters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from dflash_serve.checkpoint.config import BUILD
from dflash_serve.checkpoint.files import IN_CONFIG, QUANT_CONFIG, Header, load_object, read_object
from dflash_serve.checkpoint.storage import FLOATS, FP8_BLOCK, GROUPS, KV_SCALES, Format, Layout, Scheme, Strategy
from dflash_serve.checkpoint.tensors import PACKED
from dflash_serve.errors import Problem, raise_problems

if TYPE_CHECKING:
    from dflash_serve.deployment.description import Quantization as Requested

BITS: Mapping[str, float] = {"none": 16, "fp8": 8, "nvfp4": 4.5, "mxfp4": 4.25, "fp8-block": 8, "int8": 8, "w8a16": 8}
"""Bits per weight with its scales: NVFP4 has 8 bits for 16 values, MXFP4 8 for 32."""
OTHER_BITS = 4.5  # bits per weight of any other method: INT4 with scales (compressed-tensors, AWQ, GPTQ)
FORMATS = {"nvfp4": ("nvfp4", "fp4_pack"), "mxfp4": ("mxfp4",), "fp8": ("fp8", "float-quantized")}
"""Format -> words in a recipe that identify it."""
QUANTISING_ATTENTION = ("fp8", "nvfp4")  # formats whose checkpoints quantise attention; others keep it in bf16
ATTENTION_MODULE = r"(attn|mixer)\.\w*proj"
SPARED_ATTENTION = r"self_attn(\W*|\.kv_\w*proj\w*)$"  # modules of a recipe that keep attention in bf16


class Bits(NamedTuple):
    """Bits of a weight with its scales, by part of the model."""

    mlp: float
    attention: float
    experts: float  # routed ones


@dataclass(frozen=True)
class QuantizationRecipe:
    """A target's quantisation, of any method, as its files declare it."""

    fields: Mapping[str, object]  # {} = unquantised

    @property
    def words(self) -> list[str]:
        """Names of its method, algorithm and storage, in lower case."""
        names = map(self.fields.get, ("quant_method", "quant_algo", "format"))
        return [str(name).lower() for name in names if name]

    @property
    def format(self) -> str | None:
        """Format of the weights: fp8, nvfp4, mxfp4, or the name of another method; None = unquantised."""
        words = self.words
        for name, marks in FORMATS.items():
            if any(mark in word for word in words for mark in marks):
                return name
        return words[0] if words else None

    @property
    def precision(self) -> str | None:
        """The format in a deployment's words, as `fp8-block` and `w4a16`, where its files tell it; else `format`."""
        entry = _entry(self.fields)
        found = _quantization(entry, "", Path()) if entry else None
        return found.format if isinstance(found, Quantization) else self.format

    @property
    def by_module(self) -> Mapping[str, str]:
        """Module -> its algorithm, in lower case; only ModelOpt's MIXED_PRECISION lists them."""
        listed = self.fields.get("quantized_layers")
        entries = listed.items() if isinstance(listed, dict) else ()
        return {module: str(entry.get("quant_algo")).lower() for module, entry in entries if isinstance(entry, dict)}

    @property
    def quantises_head(self) -> bool:
        """The head's weights are quantised too."""
        return (self.format == "nvfp4" and not self.spares("lm_head")) or "lm_head" in self.by_module

    @property
    def quantises_kv(self) -> bool:
        """It requests quantised keys and values."""
        return bool(self.fields.get("kv_cache_quant_algo") or self.fields.get("kv_cache_scheme"))

    @property
    def block_rows(self) -> int:
        """Rows of a block of weights that share an FP8 scale; 0 = its scales are others."""
        shape = self.fields.get("weight_block_size")
        return max(0, shape[0]) if isinstance(shape, list) and shape and isinstance(shape[0], int) else 0

    def spares(self, pattern: str) -> bool:
        """It leaves a module unquantised that matches the regular expression."""
        lists = [self.fields.get(key) for key in ("exclude_modules", "ignore", "modules_to_not_convert")]
        return any(re.search(pattern, str(module)) for each in lists if isinstance(each, list) for module in each)

    def bits(self, requested: Requested, expert_dtype: object) -> Bits:
        """Bits of the weights as an engine stores them.

        Args:
            requested: format that the engine converts the checkpoint to; `none` = it does not.
            expert_dtype: the key of config.json with this name (DeepSeek-V4).
        """
        format = self.format if requested == "none" else requested
        mlp = BITS.get(format or "none", OTHER_BITS)
        attention = mlp if format in QUANTISING_ATTENTION and not self.spares(SPARED_ATTENTION) else 16
        if requested != "none":
            return Bits(mlp, attention, mlp)
        listed = (algorithm for module, algorithm in self.by_module.items() if re.search(ATTENTION_MODULE, module))
        if (algorithm := next(listed, None)) is not None:
            attention = BITS["nvfp4" if "nvfp4" in algorithm else "fp8"]
        of_experts = self.fields.get("moe_quant_algo") or ("mxfp4" if expert_dtype == "fp4" else format)
        return Bits(mlp, attention, BITS.get(str(of_experts).lower(), mlp))


def find_recipe(holders: Iterable[Mapping[str, object]], folder: Path) -> QuantizationRecipe:
    """A target's recipe: of the first of these objects of its config.json that has one, else of ModelOpt's file.

    Raises:
        UserError: ModelOpt's file is no JSON object.
    """
    for holder in holders:
        for key in (IN_CONFIG, "compression_config"):  # the second is what compressed-tensors wrote at first
            inside = holder.get(key)
            if isinstance(inside, dict):
                return QuantizationRecipe(inside)
    beside = folder / QUANT_CONFIG
    found = load_object(beside, kind="target").get("quantization") if beside.is_file() else None
    return QuantizationRecipe(found if isinstance(found, dict) else {})


SCHEMES: tuple[tuple[str, frozenset[str]], ...] = (
    ("NVFP4", frozenset({"weight U8", "weight_scale F8_E4M3"})),
    ("NVFP4", frozenset({"weight_packed U8", "weight_scale F8_E4M3"})),
    ("MXFP4", frozenset({"weight U8", "weight_scale U8"})),
    ("MXFP4", frozenset({"weight_packed U8", "weight_scale U8"})),
    ("MXFP8", frozenset({"weight F8_E4M3", "weight_scale U8"})),
    ("FP8 by block", frozenset({"weight F8_E4M3", "weight_scale_inv"})),
    ("FP8 per tensor", frozenset({"weight F8_E4M3", "weight_scale of one"})),
    ("FP8", frozenset({"weight F8_E4M3"})),
    ("FP8", frozenset({"weight F8_E5M2"})),
    ("INT8", frozenset({"weight I8"})),
    ("GPTQ", frozenset({"qweight", "g_idx"})),
    ("AWQ", frozenset({"qweight"})),
    ("INT4", frozenset({"weight_packed I32"})),
)
"""Quantisation schemes and their tensors (last part of the name, dtype); the first scheme that fits is reported."""
PLAIN_TARGET = "use its unquantised checkpoint, or an engine that reads it (SGLang, vLLM, TensorRT-LLM)"


def plain_target_only(recipe: QuantizationRecipe, headers: Mapping[str, Header], folder: Path) -> list[Problem]:
    """The problem of a quantised target for the embedded engine, by its recipe or its tensors; [] for a plain one.

    Args:
        recipe: of the target.
        headers: of its files; empty if they are not fetched yet.
        folder: its folder, for the message.
    """
    signs = (f"{name} is {header.dtype}" for name, header in headers.items() if _is_packed(name, header.dtype))
    sign, native = next(signs, None), recipe.format
    if sign is None and native is None:
        return []
    said = f"its recipe says {', '.join(recipe.words)}" if native else f"tensor {sign}"
    what = f"the target is quantised ({_scheme(recipe, headers)}; {said})"
    what += ", the embedded backend reads float32, bfloat16 and float16 weights only"
    return [Problem(what, str(folder), PLAIN_TARGET)]


def _is_packed(name: str, dtype: str) -> bool:
    return (name.endswith(PACKED) and not name.endswith(KV_SCALES)) or dtype not in {*FLOATS, "I64", "BOOL"}


def _scheme(recipe: QuantizationRecipe, headers: Mapping[str, Header]) -> str:
    # By the tensors if they identify it, else by the recipe.
    native = recipe.format or "unknown scheme"
    if native in ("awq", "gptq"):  # both have the same tensor names
        return native.upper()
    kinds: set[str] = set()
    for name, header in headers.items():
        last = name.rpartition(".")[2]
        kinds |= {last, f"{last} {header.dtype}"} | ({f"{last} of one"} if prod(header.shape) == 1 else set())
    shown = next((scheme for scheme, signs in SCHEMES if signs <= kinds), None)
    if shown is None and native == "fp8":
        return "FP8 by block" if recipe.fields.get("weight_block_size") else "FP8"
    return shown or (native.upper() if native in ("nvfp4", "mxfp4") else native)


ALGORITHMS: Mapping[object, tuple[Format, Strategy]] = {
    "FP8": ("fp8", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "channel"),
    "FP8_PB_WO": ("fp8-block", "block"),
    "NVFP4": ("nvfp4", "tensor"),
    "W4A16_NVFP4": ("nvfp4", "tensor"),
    "MXFP8": ("mxfp8", "group"),
}
"""ModelOpt's algorithms that are read."""
PACKINGS: Mapping[object, tuple[Format, ...]] = {
    "pack-quantized": ("w4a16", "w8a16"),
    "int-quantized": ("int8",),
    "float-quantized": ("fp8", "fp8-block"),
    "naive-quantized": ("int8", "fp8", "fp8-block"),
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mxfp8-quantized": ("mxfp8",),
}
"""Storage that compressed-tensors names -> formats that it may hold."""
STRATEGIES: Mapping[object, Strategy] = {"channel": "channel", "group": "group", "block": "block"}
READ = "read are FP8, INT8, W4A16, W8A16, NVFP4, MXFP4 and MXFP8 of ModelOpt, compressed-tensors, fp8, GPTQ and AWQ"
MIXED = "MIXED_PRECISION"  # ModelOpt's algorithm that names one for each module, in `quantized_layers`
OF_LAYERS = (r"re:layers\..*_proj$",)  # modules that GPTQ and AWQ quantise, whose files list none


@dataclass(frozen=True)
class Quantization:
    """Quantisation that a drafter declares."""

    format: Format
    excluded: tuple[str, ...]  # patterns of modules that stay in bf16
    kv_cache: str | None = None  # algorithm of the K/V cache; None = as the activations
    groups: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    """(patterns of modules or their class, storage) of each group; () = ModelOpt's, of all that is not excluded."""
    weights_alone: bool = False  # ModelOpt's W4A16_NVFP4: activations stay as they are, and need no scales

    @property
    def layout(self) -> Layout:
        """Quantiser whose names the files have."""
        return self.groups[0][1].layout if self.groups else "modelopt"

    @property
    def words(self) -> str:
        """Format and layout, for messages."""
        return f"{self.format.upper()} ({LAYOUTS[self.layout]})"

    @property
    def facts(self) -> dict[str, object]:
        """Format, layout, excluded modules and K/V format, for JSON."""
        kept = {"format": self.format, "layout": self.layout, "excluded": list(self.excluded)}
        return {**kept, "kv_cache": self.kv_cache}

    def scheme(self, module: str) -> Scheme:
        """Storage of a module that is quantised: of the group that names it, else of the one that names its class."""
        for patterns, scheme in self.groups:
            if any(_names(pattern, module) for pattern in patterns):
                return scheme
        linear = (scheme for patterns, scheme in self.groups if "Linear" in patterns)
        return next(linear, self.groups[0][1] if self.groups else Scheme(self.format))

    def declares(self, module: str) -> bool:
        """The files say that a linear module is quantised."""
        if any(_names(pattern, module) for pattern in self.excluded):
            return False
        targets = [pattern for patterns, _ in self.groups for pattern in patterns]
        return not targets or "Linear" in targets or any(_names(pattern, module) for pattern in targets)


LAYOUTS: Mapping[Layout, str] = {
    "modelopt": "ModelOpt", "compressed-tensors": "compressed-tensors", "fp8": "quant_method fp8",
    "gptq": "GPTQ", "awq": "AWQ",
}  # fmt: skip


def _names(pattern: str, module: str) -> bool:
    # compressed-tensors: whole names, or regular expressions after `re:`; ModelOpt: wildcards, or a name and all below.
    for name in (module, f"model.{module}"):
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], name):
                    return True
            except re.error:
                return False
        elif fnmatchcase(name, pattern) or name.startswith(f"{pattern}."):
            return True
    return False


def read_quantization(folder: Path) -> Quantization | None:
    """The quantisation in a drafter's config.json and hf_quant_config.json; None = not quantised.

    Raises:
        UserError: an algorithm that is not read, two files that disagree, or a file that is no JSON object.
    """
    problems: list[Problem] = []
    raw = read_object(folder / "config.json", problems)
    found, unread = find_quantization(raw or {}, folder)
    raise_problems(problems + unread)
    return found


def find_quantization(config: Mapping[str, object], folder: Path) -> tuple[Quantization | None, list[Problem]]:
    """The quantisation in a drafter's parsed config.json and in the hf_quant_config.json beside it, and its problems.

    None = not quantised, or by an algorithm that is not read, which is a problem.
    """
    inline, beside = config.get(IN_CONFIG), folder / QUANT_CONFIG
    if inline is not None and not isinstance(inline, dict):
        what = f"{IN_CONFIG} is {inline!r}, not an object"
        return None, [Problem(what, str(folder / "config.json"), "correct it")]
    problems: list[Problem] = []
    declared = {
        f"config.json's {IN_CONFIG}": inline,
        QUANT_CONFIG: read_object(beside, problems) if beside.is_file() else None,
    }
    read: dict[str, Quantization] = {}
    for name, outer in declared.items():
        if entry := _entry(outer):
            found = _quantization(entry, name, folder)
            if isinstance(found, Problem):
                problems.append(found)
            else:
                read[name] = found
    if len({found.format for found in read.values()}) > 1:
        said = ", ".join(f"{name} says {found.format}" for name, found in read.items())
        problems.append(Problem(said, str(folder), "keep the right one"))
    return next(iter(read.values()), None), problems


def _entry(outer: Mapping[str, object] | None) -> Mapping[str, object] | None:
    # ModelOpt's exporters write `quant_algo` at either of two depths.
    inner = (outer or {}).get("quantization")
    return cast("Mapping[str, object]", inner) if isinstance(inner, dict) and inner else outer or None


def _quantization(entry: Mapping[str, object], name: str, folder: Path) -> Quantization | Problem:
    method = entry.get("quant_method")
    if entry.get("quant_algo") is None and method == "compressed-tensors":
        found = _compressed_tensors(entry)
    elif entry.get("quant_algo") is None and method == "fp8":
        found = _fp8(entry)
    elif method in ("gptq", "awq"):
        found = _turned(entry, str(method))
    elif entry.get("quant_algo") == MIXED:
        found = _mixed(entry)
    else:
        found = _modelopt(entry)
    if isinstance(found, str):
        return Problem(f"the drafter is quantised with {found} ({name}), which is not read; {READ}", str(folder), BUILD)
    return found


def _modelopt(entry: Mapping[str, object]) -> Quantization | str:
    algorithm = entry.get("quant_algo") or entry.get("quant_method")
    format, strategy = ALGORITHMS.get(algorithm, (None, None)) if isinstance(algorithm, str) else (None, None)
    if format is None or strategy is None:
        return repr(algorithm)
    kv_cache = entry.get("kv_cache_quant_algo") or ("FP8" if entry.get("kv_cache_scheme") else None)
    groups = () if strategy == "tensor" else ((("Linear",), Scheme(format, "modelopt", strategy)),)
    excluded, alone = _excluded(entry, "exclude_modules", "ignore"), algorithm == "W4A16_NVFP4"
    return Quantization(format, excluded, str(kv_cache) if kv_cache else None, groups, alone)


def _fp8(entry: Mapping[str, object]) -> Quantization | str:
    block = entry.get("weight_block_size")
    excluded = _excluded(entry, "modules_to_not_convert", "ignored_layers")
    if block is None:
        scheme = Scheme("fp8", "fp8", static_inputs=entry.get("activation_scheme") == "static")
    elif sizes := _block(block):
        scheme = Scheme("fp8-block", "fp8", "block", block=sizes)
    else:
        return f"'fp8' with weight_block_size {block!r}"
    return Quantization(scheme.format, excluded, None, ((("Linear",), scheme),))


def _turned(entry: Mapping[str, object], method: str) -> Quantization | str:
    # GPTQ's and AWQ's; AutoGPTQ's first form stores zero points less 1, gptq_v2 does not.
    bits, group, kind = entry.get("bits"), entry.get("group_size"), entry.get("checkpoint_format") or "gptq"
    said = f"{method!r} with bits {bits!r}, group_size {group!r}"
    if bits not in ((4, 8) if method == "gptq" else (4,)) or not isinstance(group, int) or group == 0:
        return said
    if method == "awq" and str(entry.get("version") or "gemm").lower() != "gemm":
        return f"{said}, version {entry.get('version')!r}"
    if method == "gptq" and (kind not in ("gptq", "gptq_v2") or entry.get("dynamic")):
        rules = " and rules by module (dynamic)" if entry.get("dynamic") else ""
        return f"{said}, checkpoint_format {kind!r}{rules}"
    scheme = Scheme(
        "w4a16" if bits == 4 else "w8a16",
        "gptq" if method == "gptq" else "awq",
        "channel" if group < 0 else "group",
        group=max(0, group),
        symmetric=entry.get("sym") is True,
        ordered=entry.get("desc_act") is True,
        zeros_less_one=method == "gptq" and kind == "gptq",
    )
    return Quantization(scheme.format, _excluded(entry, "modules_to_not_convert"), None, ((OF_LAYERS, scheme),))


def _mixed(entry: Mapping[str, object]) -> Quantization | str:
    # ModelOpt's list of modules, each with an algorithm.
    listed, groups = entry.get("quantized_layers"), dict[Scheme, list[str]]()
    if not isinstance(listed, dict) or not listed:
        return f"{MIXED!r} without quantized_layers"
    for module, own in listed.items():
        algorithm = own.get("quant_algo") if isinstance(own, dict) else None
        if algorithm not in ALGORITHMS:
            return f"{MIXED!r} with {algorithm!r}"
        format, strategy = ALGORITHMS[algorithm]
        groups.setdefault(Scheme(format, "modelopt", strategy), []).append(str(module).removeprefix("model."))
    kv_cache, formats = entry.get("kv_cache_quant_algo"), {scheme.format for scheme in groups}
    return Quantization(
        formats.pop() if len(formats) == 1 else "mixed",
        _excluded(entry, "exclude_modules", "ignore"),
        str(kv_cache) if kv_cache else None,
        tuple((tuple(modules), scheme) for scheme, modules in groups.items()),
    )


def _compressed_tensors(entry: Mapping[str, object]) -> Quantization | str:
    given = entry.get("config_groups")
    groups: list[tuple[tuple[str, ...], Scheme]] = []
    if entry.get("transform_config"):
        return "compressed-tensors' transforms, which rotate weights"
    for name, group in given.items() if isinstance(given, dict) else ():
        scheme = _storage(group, entry.get("format")) if isinstance(group, dict) else "no arguments"
        if isinstance(scheme, str):
            return f"compressed-tensors, config_groups.{name}: {scheme}"
        targets = group.get("targets")
        groups.append((tuple(map(str, targets)) if isinstance(targets, list) else ("Linear",), scheme))
    if not groups:
        return "compressed-tensors without config_groups"
    formats = list(dict.fromkeys(scheme.format for _, scheme in groups))
    if len(formats) > 1:
        return f"compressed-tensors in several formats ({', '.join(formats)})"
    kv_cache = "FP8" if entry.get("kv_cache_scheme") else None
    return Quantization(formats[0], _excluded(entry, "ignore"), kv_cache, tuple(groups))


def _storage(group: Mapping[str, object], packing: object) -> Scheme | str:
    # A config_group, or the words for what of it is not read.
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        return "no weights"
    packing = group.get("format") or packing
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    size = weights.get("group_size")
    said = f"{kind}{bits} weights by {strategy} in {packing!r}"
    format = _format(kind, bits, strategy, size, packing)
    if format is None or not isinstance(packing, str) or format not in PACKINGS.get(packing, ()):
        return said
    block = _block(weights.get("block_structure")) if strategy == "block" else None
    if strategy == "block" and block is None:
        return f"{said} of {weights.get('block_structure')!r}"
    if strategy == "group" and not (isinstance(size, int) and size > 0):
        return f"{said} of {size!r}"
    return Scheme(
        format,
        "compressed-tensors",
        "tensor" if format in GROUPS else STRATEGIES.get(strategy, "tensor"),
        group=size if strategy == "group" and isinstance(size, int) and format not in GROUPS else 0,
        block=block or FP8_BLOCK,
        symmetric=weights.get("symmetric") is not False,
        ordered=weights.get("actorder") == "group",
        static_inputs=isinstance(inputs, dict) and inputs.get("dynamic") is not True,
        weights_alone=format in ("fp8", "fp8-block") and inputs is None,
    )


def _format(kind: object, bits: object, strategy: object, size: object, packing: object) -> Format | None:
    if kind == "float" and bits == 4:
        return "nvfp4" if size == GROUPS["nvfp4"] else "mxfp4" if size == GROUPS["mxfp4"] else None
    if kind == "float" and bits == 8 and strategy == "group" and size == GROUPS["mxfp8"]:
        return "mxfp8"
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel", "block"):
        return "fp8-block" if strategy == "block" else "fp8"
    if kind == "int" and bits in (4, 8) and strategy in ("tensor", "channel", "group"):
        if packing == "pack-quantized":
            return "w4a16" if bits == 4 else "w8a16"
        return "int8" if bits == 8 else None
    return None


def _block(given: object) -> tuple[int, int] | None:
    sizes = given.split("x") if isinstance(given, str) else given
    if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdecimal() and int(size) > 0 for size in sizes):
        return int(sizes[0]), int(sizes[1])
    return None


def _excluded(entry: Mapping[str, object], *keys: str) -> tuple[str, ...]:
    listed = next((entry[key] for key in keys if isinstance(entry.get(key), list)), [])
    return tuple(str(module) for module in listed) if isinstance(listed, list) else ()


def plain_only(quantization: Quantization | None, reader: str, where: str) -> list[Problem]:
    """The problem of a quantised drafter for a reader of plain weights; [] for a plain drafter.

    Args:
        quantization: of the drafter.
        reader: name of the reader in the message, such as `this command`.
        where: the field or folder that names the drafter.
    """
    if quantization is None:
        return []
    what = f"the drafter is quantised to {quantization.format.upper()}, {reader} reads bf16 drafters only"
    return [
        Problem(what, where, "`dflash-serve convert --dequantise` writes it in bf16; or use a backend that reads it")
    ]

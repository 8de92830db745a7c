"""Declarations of a drafter's quantised weights, as config.json and hf_quant_config.json have them. No torch.

Modules that stay in bf16 are listed under every name that engines give them: with and without `model.`, and as parts of
the products that engines fuse. A kind of module that is in bf16 in all layers is one pattern, because engines may
number a drafter's layers behind the target's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dflash_serve.checkpoint.config import DrafterConfig, expected_tensors
from dflash_serve.checkpoint.files import IN_CONFIG, QUANT_CONFIG
from dflash_serve.checkpoint.quantization import ALGORITHMS, PACKINGS
from dflash_serve.checkpoint.storage import GROUPS, Scheme
from dflash_serve.checkpoint.tensors import FUSED

NAMES = {stored: name for name, stored in ALGORITHMS.items()}
"""(format, strategy) -> ModelOpt's algorithm; NVFP4's depends on its activations."""
STORAGE = {format: name for name, formats in reversed([*PACKINGS.items()]) for format in formats}
"""Format -> compressed-tensors' storage: the first that may hold it."""
LAYER = re.compile(r"layers\.(\d+)\.(.+)")
WHOLE = ("lm_head", "embed_tokens")  # modules of the target that engines put beside a drafter's own


def declarations(
    config: DrafterConfig, quantised: Mapping[str, Scheme], behind: int | None = None
) -> dict[str, dict[str, object]]:
    """File -> its keys that say how the weights are stored; {} for a drafter that is not quantised.

    Args:
        config: the drafter.
        quantised: our names of its quantised modules -> their storage, of one format and one layout.
        behind: layers of the target, behind which an engine (vLLM) numbers the drafter's; None = no such names.
    """
    if not quantised:
        return {}
    first, dense = next(iter(quantised.values())), dense_modules(config, quantised)
    if first.layout == "modelopt":
        facts = _modelopt(first, list(_listed(dense, config.num_layers, "*{}", behind)))
        inline = {"quant_method": "modelopt", **facts, "ignore": facts["exclude_modules"]}
        return {"config.json": {IN_CONFIG: inline}, QUANT_CONFIG: {"quantization": facts}}
    if first.layout == "gptq":
        return {"config.json": {IN_CONFIG: _gptq(first)}}
    if first.layout == "awq":
        return {"config.json": {IN_CONFIG: _awq(first, list(_listed(dense, config.num_layers, "", behind)))}}
    if first.layout == "fp8":
        return {"config.json": {IN_CONFIG: _fp8(first, list(_listed(dense, config.num_layers, "", behind)))}}
    ignore = list(_listed(dense, config.num_layers, r"re:(.*\.)?{}$", behind))
    return {"config.json": {IN_CONFIG: _compressed_tensors(quantised, ignore)}}


def dense_modules(config: DrafterConfig, quantised: Mapping[str, Scheme]) -> list[str]:
    """Our names of the modules with a matrix that are not quantised: products, `fc`, and linear parts of heads."""
    matrices = (
        name for name, shape in expected_tensors(config).items() if len(shape) == 2 and name.endswith(".weight")
    )
    return [module for name in matrices if (module := name.removesuffix(".weight")) not in quantised]


def _modelopt(scheme: Scheme, excluded: Sequence[str]) -> dict[str, object]:
    nvfp4 = "NVFP4" if scheme.static_inputs else "W4A16_NVFP4"
    algorithm = nvfp4 if scheme.format == "nvfp4" else NAMES[scheme.format, scheme.strategy]
    facts: dict[str, object] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": list(excluded)}
    return {**facts, "group_size": GROUPS["nvfp4"]} if scheme.format == "nvfp4" else facts


def _fp8(scheme: Scheme, excluded: Sequence[str]) -> dict[str, object]:
    facts: dict[str, object] = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": list(excluded)}
    facts["activation_scheme"] = "static" if scheme.static_inputs else "dynamic"
    return {**facts, "weight_block_size": list(scheme.block)} if scheme.format == "fp8-block" else facts


def _gptq(scheme: Scheme) -> dict[str, object]:
    # The modules are for vLLM, which takes a part of a name; with no list it would take `fc`, too.
    parts = (name for fused, parts in FUSED.items() for name in (fused, *parts))
    return {
        **_turned(scheme, "gptq"),
        "sym": scheme.symmetric,
        "desc_act": scheme.ordered,
        "checkpoint_format": "gptq" if scheme.zeros_less_one else "gptq_v2",
        "lm_head": False,
        "modules_in_block_to_quantize": [*parts, "o_proj", "down_proj"],
    }


def _awq(scheme: Scheme, excluded: Sequence[str]) -> dict[str, object]:
    return {**_turned(scheme, "awq"), "version": "gemm", "zero_point": True, "modules_to_not_convert": list(excluded)}


def _turned(scheme: Scheme, method: str) -> dict[str, object]:
    return {"quant_method": method, "bits": scheme.bits, "group_size": scheme.group or -1}


def _compressed_tensors(quantised: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, object]:
    schemes = list(dict.fromkeys(quantised.values()))
    groups: dict[str, object] = {}
    for number, scheme in enumerate(schemes):
        modules = [module for module, own in quantised.items() if own == scheme]
        targets = ["Linear"] if len(schemes) == 1 else [name for one in modules for name in (one, f"model.{one}")]
        groups[f"group_{number}"] = {"targets": targets, **_arguments(scheme), "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": STORAGE[schemes[0].format],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _arguments(scheme: Scheme) -> dict[str, object]:
    floats = scheme.format not in ("int8", "w4a16", "w8a16")
    strategy: str = {"nvfp4": "tensor_group", "mxfp4": "group", "mxfp8": "group"}.get(scheme.format, scheme.strategy)
    weights: dict[str, object] = {
        "num_bits": scheme.bits,
        "type": "float" if floats else "int",
        "strategy": strategy,
        "symmetric": scheme.symmetric,
        "dynamic": False,
        "group_size": GROUPS.get(scheme.format) or scheme.group or None,
        "block_structure": list(scheme.block) if scheme.strategy == "block" else None,
        "actorder": "group" if scheme.ordered else None,
    }
    if scheme.format == "mxfp8":
        weights["scale_dtype"] = "torch.uint8"
    return {"weights": weights, "input_activations": _inputs(scheme)}


def _inputs(scheme: Scheme) -> dict[str, object] | None:
    # Activations: 4 bits by groups beside NVFP4 with their scale, 8 bits beside FP8 and INT8, else as they are.
    if scheme.weights_alone or scheme.format in ("w4a16", "w8a16", "mxfp4"):
        return None
    if scheme.format == "nvfp4" and not scheme.static_inputs:
        return None
    common: dict[str, object] = {"num_bits": scheme.bits, "type": "int" if scheme.format == "int8" else "float"}
    common |= {"symmetric": True, "dynamic": True, "strategy": "token", "group_size": None}
    if scheme.format == "nvfp4":
        return {**common, "dynamic": "local", "strategy": "tensor_group", "group_size": GROUPS["nvfp4"]}
    if scheme.format == "fp8-block":
        return {**common, "strategy": "group", "group_size": scheme.block[1]}
    if scheme.format == "mxfp8":
        return {**common, "strategy": "group", "group_size": GROUPS["mxfp8"], "scale_dtype": "torch.uint8"}
    return {**common, "dynamic": False, "strategy": "tensor"} if scheme.static_inputs else common


def _listed(dense: Sequence[str], layers: int, pattern: str, behind: int | None) -> Iterator[str]:
    # Modules in bf16, products of engines' own among them. Where a kind is so in all layers: its last name alone, which
    # is all that SGLang has, or a `pattern` that matches it; else, and for lists of whole names, each layer's.
    kinds: dict[str, list[str]] = {}
    for module in dense:
        found = LAYER.fullmatch(module)
        kinds.setdefault(found[2] if found else module, []).append(module)
    for fused, parts in FUSED.items():
        for parent in ("self_attn", "mlp"):
            group = [{LAYER.fullmatch(one)[1] for one in kinds.get(f"{parent}.{part}", ())} for part in parts]  # type: ignore[index]
            if whole := set.intersection(*group):
                kinds[f"{parent}.{fused}"] = [f"layers.{index}.{parent}.{fused}" for index in sorted(whole, key=int)]
    for kind, modules in kinds.items():
        last = kind.rpartition(".")[2]
        in_all = LAYER.fullmatch(modules[0]) is not None and len(modules) == layers
        if in_all:
            yield pattern.format(re.escape(last) if pattern.startswith("re:") else last) if pattern else last
        if not (in_all and pattern):
            yield from (name for module in modules for name in _names(module, behind))
    yield from (name for one in WHOLE if one not in kinds for name in (one, f"model.{one}"))


def _names(module: str, behind: int | None) -> list[str]:
    found = LAYER.fullmatch(module)
    if found is None or behind is None:
        return [module, f"model.{module}"]
    return [module, f"model.{module}", f"model.layers.{int(found[1]) + behind}.{found[2]}"]

"""Reads drafters that ModelOpt (or our build) has quantised, as strictly as the others.

ModelOpt 0.47 writes the algorithm into `hf_quant_config.json` and, in another shape, into config.json's
`quantization_config`; weights keep their names, with `weight_scale`, `weight_scale_2` and `input_scale` beside them.
Only `load_*` need torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import parse
from dflash_serve.checkpoint.headers import read_headers
from dflash_serve.checkpoint.tensor_names import expected_tensors, parts_of, proper_name
from dflash_serve.errors import Problem, UserError, raise_problems

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dflash_serve.checkpoint.formats import Format, QuantizedTensor

    Weight = Tensor | QuantizedTensor

QUANT_CONFIG = "hf_quant_config.json"
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
ALGORITHMS = {"FP8": "fp8", "NVFP4": "nvfp4"}
OTHER = "build it with `dflash-serve build`, which writes FP8 and NVFP4"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint says it is quantised."""

    format: Format
    excluded: tuple[str, ...]
    """Modules left in bf16, as patterns."""
    kv_cache: str | None = None


def read_quantization(folder: Path) -> Quantization | None:
    """What config.json or hf_quant_config.json says; None = not quantised.

    Raises:
        UserError: an algorithm that we do not read, or two files that disagree.
    """
    found = [entry for entry in (_inner(folder / "config.json"), _inner(folder / QUANT_CONFIG)) if entry]
    read = [_quantization(entry, folder) for entry in found]
    if len(read) == 2 and read[0].format != read[1].format:
        what = f"config.json says {read[0].format}, {QUANT_CONFIG} says {read[1].format}"
        raise UserError(what, where=str(folder), do="keep the right one")
    return read[0] if read else None


def _inner(path: Path) -> Mapping[str, object] | None:
    """The object with `quant_algo`: at three depths, as ModelOpt's exporters have it."""
    raw = _json(path) if path.is_file() else {}
    if path.name == "config.json":
        raw = _object(raw.get("quantization_config"))
    return _object(raw.get("quantization")) or raw or None


def _object(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}


def _quantization(entry: Mapping[str, object], folder: Path) -> Quantization:
    algorithm = entry.get("quant_algo") or entry.get("quant_method")
    if algorithm not in ALGORITHMS:
        raise UserError(f"quantised with {algorithm!r}, which is not read", where=str(folder), do=OTHER)
    listed = entry.get("exclude_modules", entry.get("ignore"))
    excluded = tuple(str(name) for name in listed) if isinstance(listed, list) else ()
    kv_cache = entry.get("kv_cache_quant_algo")
    return Quantization(cast("Format", ALGORITHMS[str(algorithm)]), excluded, str(kv_cache) if kv_cache else None)


def read_drafter(folder: Path) -> tuple[DrafterConfig, Quantization | None]:
    """The description of a drafter, quantised or not; needs config.json only.

    Raises:
        UserError: not a drafter we can read.
    """
    quantization = read_quantization(folder)
    raw = {key: value for key, value in _json(folder / "config.json").items() if key != "quantization_config"}
    headers = read_headers(folder, [])
    problems: list[Problem] = []
    own_mask = any(proper_name(name) == "mask_embedding" for name in headers)
    config, _ = parse(raw, folder / "config.json", problems, has_mask_embedding=own_mask)
    raise_problems(problems, hint="`dflash-serve inspect` shows all")
    assert config is not None
    return config, quantization


def _json(path: Path) -> Mapping[str, object]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no config.json", where=str(path.parent), do="give a drafter's folder") from None
    except (ValueError, OSError) as error:
        raise UserError(f"not valid JSON ({error})", where=str(path), do="download the drafter again") from None
    return _object(raw)


def load_weights(folder: Path) -> tuple[DrafterConfig, dict[str, Weight]]:
    """Every tensor of a drafter by our name, quantised ones with their scales.

    Raises:
        UserError: a tensor or scale is missing, extra or misshapen.
    """
    from safetensors import safe_open

    config, quantization = read_drafter(folder)
    problems: list[Problem] = []
    headers = read_headers(folder, problems)
    raise_problems(problems)
    stored: dict[str, Tensor] = {}
    for file in sorted({header.file for header in headers.values()}):
        with safe_open(file, framework="pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    weights = assemble(stored, config, quantization.format if quantization else None)
    return config, weights


def assemble(stored: Mapping[str, Tensor], config: DrafterConfig, format: Format | None) -> dict[str, Weight]:
    """Tensors by a checkpoint's names -> weights by ours, strictly: no name is left over and none is missing.

    Raises:
        UserError: all that does not fit, in one message.
    """
    split = _split_fused(stored, config)
    scales = {name for name in split if name.rsplit(".", 1)[-1] in SCALES}
    expected = expected_tensors(config)
    weights: dict[str, Weight] = {}
    faults = [f"{name} is missing" for name in expected.keys() - split.keys()]
    faults += [f"{name} is not part of this drafter" for name in split.keys() - expected.keys() - scales]
    for name in expected.keys() & split.keys():
        weight = _with_scales(name, split, scales, format)
        if isinstance(weight, str):
            faults.append(weight)
        elif tuple(weight.shape) != expected[name]:
            faults.append(f"{name} has shape {list(weight.shape)}, config.json asks for {list(expected[name])}")
        else:
            weights[name] = weight
    faults += [f"{name} belongs to no quantised weight" for name in sorted(scales)]
    if faults:
        shown = "; ".join(sorted(faults)[:4]) + (f" and {len(faults) - 4} more" if len(faults) > 4 else "")
        raise UserError(shown, where="drafter weights", do="use weights and config.json of one drafter")
    return weights


def _split_fused(stored: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """Unprefixed names; fused qkv_proj and gate_up_proj cut into their parts (a scale of one number serves all)."""
    shapes = expected_tensors(config)
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        parts = parts_of(name, config)
        for part in parts:
            rows = shapes.get(part.name.rsplit(".", 1)[0] + ".weight", (0,))[0]
            start = part.start or 0
            whole = len(parts) == 1 or tensor.dim() == 0 or tensor.numel() == 1
            out[part.name] = tensor if whole else tensor[start : start + rows]
    return out


def _with_scales(name: str, split: Mapping[str, Tensor], scales: set[str], format: Format | None) -> Weight | str:
    """The weight, with its scales taken out of `scales`; a sentence where they do not fit together."""
    import torch

    from dflash_serve.checkpoint.formats import QuantizedTensor

    tensor, module = split[name], name.rsplit(".", 1)[0]
    mine = {key: split[f"{module}.{key}"] for key in SCALES if f"{module}.{key}" in split}
    if not name.endswith(".weight") or not mine:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        return tensor if tensor.dtype in floats else f"{name} is {tensor.dtype} without a weight_scale"
    scales -= {f"{module}.{key}" for key in mine}
    wanted = {torch.float8_e4m3fn: "fp8", torch.uint8: "nvfp4"}.get(tensor.dtype)
    if wanted is None or wanted != format:
        return f"{name} is {tensor.dtype} with scales, but the checkpoint says {format or 'not quantised'}"
    if "weight_scale" not in mine or (wanted == "nvfp4") != ("weight_scale_2" in mine):
        return f"{name} has the scales {sorted(mine)}, which are not those of {wanted}"
    cells = (tensor.shape[0], tensor.shape[-1] // 8) if wanted == "nvfp4" else ()
    scale = mine["weight_scale"] if wanted == "nvfp4" else mine["weight_scale"].reshape(())
    if tuple(scale.shape) != cells:
        return f"{module}.weight_scale has shape {list(scale.shape)}, not {list(cells)}"
    return QuantizedTensor(cast("Format", wanted), tensor, scale, mine.get("weight_scale_2"), mine.get("input_scale"))


def dequantized(weights: Mapping[str, Weight], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights that an engine multiplies with, as plain tensors."""
    from dflash_serve.checkpoint.formats import QuantizedTensor

    return {
        name: weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
        for name, weight in weights.items()
    }

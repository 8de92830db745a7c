"""How far every tensor of a written checkpoint is from its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_serve.checkpoint.files import INDEX, SINGLE
from dflash_serve.checkpoint.formats import Format, QuantizedTensor, relative_error
from dflash_serve.errors import UserError

from .pipeline import Measured

BOUNDS: Mapping[Format, float] = {"fp8": 0.04, "nvfp4": 0.15}
"""A weight that is farther from its source than this was not quantised but broken."""


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, from one file or from shards."""
    index = folder / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SINGLE}
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        with safe_open(folder / name, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    return tensors


def decoded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain fp32 weights of a ModelOpt checkpoint; scales are used up, K/V scales left out."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"):
            continue
        scale = tensors.get(f"{module}.weight_scale")
        if leaf != "weight" or scale is None:
            plain[name] = tensor.float()
            continue
        format: Format = "fp8" if tensor.dtype == torch.float8_e4m3fn else "nvfp4"
        plain[name] = QuantizedTensor(format, tensor, scale, tensors.get(f"{module}.weight_scale_2")).dequantize()
    return plain


def compare(source: Mapping[str, Tensor], written: Mapping[str, Tensor], bound: float) -> Measured:
    """Relative error of every tensor, and the worst; tied heads that one side leaves out do not count.

    Raises:
        UserError: a tensor is lost, or farther away than `bound`.
    """
    lost = sorted(source.keys() - written.keys() - {"lm_head.weight"})
    if lost:
        raise UserError(f"tensor {lost[0]} was lost (and {len(lost) - 1} more)", where="quantised checkpoint")
    errors = {name: relative_error(source[name], written[name]) for name in sorted(source.keys() & written.keys())}
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > bound:
        what = f"tensor {worst} is {errors[worst]:.3f} away from its source, more than {bound}"
        raise UserError(what, where="quantised checkpoint", do="report this: its scales were written wrongly")
    changed = [error for error in errors.values() if error > 0]
    return {
        "worst_tensor": worst,
        "worst_error": round(errors[worst], 6),
        "mean_error_of_quantised": round(sum(changed) / len(changed), 6) if changed else 0.0,
        "errors": {name: round(error, 6) for name, error in errors.items()},
    }

"""Quantised drafters in the forms that engines load. Needs torch.

Engines keep `fc` and heads in bf16, take the parts of a fused product in one format, and have one scale for it where
the scale belongs to the tensor. A weight whose scale changes is rounded again; all others keep every bit. NVFP4's
global scale in compressed-tensors' files is the reciprocal of ModelOpt's, in float32: a change of layout may round it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dflash_serve.checkpoint.formats import (
    FP8_MAX,
    QuantizedTensor,
    Weight,
    pack_fp4,
    quantized_tensor,
    relative_error,
    stored_tensors,
)
from dflash_serve.checkpoint.quantization import LAYOUTS
from dflash_serve.checkpoint.storage import GROUPS, TURNED, Layout, Scheme
from dflash_serve.checkpoint.tensors import FUSED
from dflash_serve.errors import UserError

FORMATS: Mapping[Layout, tuple[str, ...]] = {
    "modelopt": ("fp8", "fp8-block", "nvfp4"),
    "fp8": ("fp8", "fp8-block"),
    "compressed-tensors": ("fp8", "fp8-block", "int8", "w8a16", "w4a16", "nvfp4", "mxfp4"),
}
"""Formats that a layout can store, of those that are written; GPTQ's and AWQ's weights become compressed-tensors'."""


@dataclass
class Repacked:
    """A drafter's weights in another form, and what that cost."""

    plain: dict[str, Tensor] = field(default_factory=dict)  # by our names
    weights: dict[str, QuantizedTensor] = field(default_factory=dict)  # by our names of modules
    schemes: dict[str, Scheme] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)
    """Module -> relative error of its weight (Frobenius norm); modules whose values are as before are left out."""
    decoded: list[str] = field(default_factory=list)  # modules that were quantised and are plain now

    @property
    def with_shapes(self) -> dict[str, Tensor]:
        """Every weight by our name; those of quantised modules have no data, only a shape."""
        empty = {f"{name}.weight": torch.empty(one.shape, device="meta") for name, one in self.weights.items()}
        return {**self.plain, **empty}

    @property
    def stored(self) -> dict[str, Tensor]:
        """The tensors of the quantised modules, by their names in the checkpoint."""
        return {
            f"{module}.{leaf}": tensor
            for module, weight in self.weights.items()
            for leaf, tensor in stored_tensors(self.schemes[module], weight).items()
        }

    @property
    def report(self) -> dict[str, object]:
        """Figures for JSON."""
        worst = max(self.rounded, key=lambda module: self.rounded[module], default=None)
        first = next(iter(self.schemes.values()), None)
        return {
            "format": first.format if first else None,
            "layout": first.layout if first else None,
            "quantised": len(self.schemes),
            "decoded": self.decoded,
            "rounded": len(self.rounded),
            "largest_error": self.rounded[worst] if worst else 0.0,
            "largest_in": worst,
            "mean_error": sum(self.rounded.values()) / len(self.rounded) if self.rounded else 0.0,
        }

    @property
    def words(self) -> str:
        """The report as one line."""
        first = next(iter(self.schemes.values()), None)
        said = f"{len(self.decoded)} weights decoded to bf16" if self.decoded else ""
        if first is not None:
            kept = f"{len(self.schemes)} weights in {first.format.upper()} ({LAYOUTS[first.layout]})"
            said = f"{kept}, {said}" if said else kept
        if not self.rounded:
            return f"{said}; no value changed"
        figures = self.report
        what = f"{said}; {len(self.rounded)} of them were rounded: relative error at most"
        return (
            f"{what} {figures['largest_error']:.2g} ({figures['largest_in']}), {figures['mean_error']:.2g} on average"
        )


def dequantised(weights: Mapping[str, Weight]) -> Repacked:
    """Every weight plain: quantised ones in bfloat16."""
    found = Repacked()
    for name, weight in weights.items():
        if isinstance(weight, QuantizedTensor):
            _decode(found, name.removesuffix(".weight"), weight)
        else:
            found.plain[name] = weight
    return found


def repacked(weights: Mapping[str, Weight], schemes: Mapping[str, Scheme], layout: Layout | None = None) -> Repacked:
    """The weights as engines load them.

    Args:
        weights: of a drafter, by our names.
        schemes: our names of its quantised modules -> their storage.
        layout: to write; None = the one that it has.

    Raises:
        UserError: the layout cannot store the format.
    """
    found = Repacked()
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not isinstance(weight, QuantizedTensor):
            found.plain[name] = weight
        elif _stays_quantised(module, schemes):
            found.weights[module], found.schemes[module] = weight, _in_layout(schemes[module], weight, layout)
        else:
            _decode(found, module, weight)
    if len({scheme.format for scheme in found.schemes.values()}) > 1:
        what = "its products are stored in several formats, which is written in no layout"
        raise UserError(what, where="SRC", do="--dequantise writes it in bf16")
    for group in _groups(found.weights):
        _share_scales(found, group)
    for module, scheme in found.schemes.items():
        if scheme.format == "nvfp4" and scheme.layout != schemes[module].layout:
            stored = quantized_tensor(scheme, stored_tensors(scheme, found.weights[module]))
            _note(found, module, weights[f"{module}.weight"], stored)
    return found


def _stays_quantised(module: str, schemes: Mapping[str, Scheme]) -> bool:
    # A product of a layer whose partners, if an engine fuses it, are stored alike.
    parent, _, product = module.rpartition(".")
    if not module.startswith("layers.") or not product.endswith("_proj"):
        return False
    group = next((parts for parts in FUSED.values() if product in parts), (product,))
    return {schemes.get(f"{parent}.{part}") for part in group} == {schemes[module]}


def _in_layout(scheme: Scheme, weight: QuantizedTensor, layout: Layout | None) -> Scheme:
    layout = layout or ("compressed-tensors" if scheme.layout in TURNED else scheme.layout)
    if scheme.format not in FORMATS[layout]:
        where, can = "--layout", ", ".join(name for name in FORMATS if scheme.format in FORMATS[name])
        do = f"take {can}" if can else "--dequantise writes it in bf16"
        what = f"{scheme.format.upper()} is not written in the layout of {LAYOUTS[layout]}"
        raise UserError(what, where=where, do=do)
    if (scheme.format, scheme.strategy, layout) == ("fp8", "channel", "fp8"):
        what = "`quant_method: fp8` has no scales by row"
        raise UserError(what, where="--layout", do="take compressed-tensors or modelopt")
    if scheme.weights_alone and layout != "compressed-tensors":
        what = f"{LAYOUTS[layout]} rounds activations beside FP8 weights, and this drafter's are not rounded"
        raise UserError(what, where="--layout", do="take compressed-tensors, or --dequantise")
    if scheme.layout in TURNED:
        symmetric, ordered = weight.zero_point is None, weight.order is not None
        return replace(scheme, layout=layout, symmetric=symmetric, ordered=ordered, zeros_less_one=False)
    static = weight.input_scale is not None and scheme.format != "int8"  # their activations are scaled as they come
    return replace(scheme, layout=layout, static_inputs=static)


def _decode(found: Repacked, module: str, weight: QuantizedTensor) -> None:
    found.plain[f"{module}.weight"] = weight.dequantize(torch.bfloat16)
    found.decoded.append(module)
    _note(found, module, weight, found.plain[f"{module}.weight"])


def _note(found: Repacked, module: str, before: Weight, after: Weight) -> None:
    one, other = (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight for weight in (before, after))
    if error := relative_error(one, other):
        found.rounded[module] = error


def _groups(weights: Mapping[str, QuantizedTensor]) -> Iterator[list[str]]:
    for parent in dict.fromkeys(module.rpartition(".")[0] for module in weights):
        for parts in FUSED.values():
            group = [f"{parent}.{part}" for part in parts]
            if all(module in weights for module in group):
                yield group


def _share_scales(found: Repacked, group: list[str]) -> None:
    # One scale of the tensor, the largest, for weights and for activations.
    parts = [found.weights[module] for module in group]
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    shared = torch.stack([one.float() for one in inputs]).max() if len(inputs) == len(parts) else None
    if parts[0].format == "nvfp4":
        scales = [part.scale_2.float() for part in parts if part.scale_2 is not None]
    else:
        scales = [part.scale.float() for part in parts if part.format == "fp8" and part.scale.dim() == 0]
    for module, part in zip(group, parts, strict=True):
        new = replace(part, input_scale=shared)
        if len(scales) == len(parts):
            new = _with_scale(new, torch.stack(scales).max())
            _note(found, module, part, new)
        found.weights[module] = new
        found.schemes[module] = replace(found.schemes[module], static_inputs=shared is not None)


def _with_scale(weight: QuantizedTensor, largest: Tensor) -> QuantizedTensor:
    # The weight with this scale of the tensor; its bits stay if that is its own.
    own = weight.scale if weight.format == "fp8" else weight.scale_2
    if own is None or torch.equal(own.float(), largest):
        return weight
    if weight.format == "fp8":
        values = (weight.dequantize() / largest).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return replace(weight, values=values, scale=largest)
    scale = (weight.scale.float() * own.float() / largest).to(torch.float8_e4m3fn)
    step = (scale.float() * largest)[..., None]
    blocks = weight.dequantize().view(len(weight.values), -1, GROUPS["nvfp4"])
    codes = torch.where(step > 0, blocks / step, torch.zeros_like(blocks))
    return replace(weight, values=pack_fp4(codes.view(weight.shape)), scale=scale, scale_2=largest)

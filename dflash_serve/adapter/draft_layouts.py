"""Quantised drafters on an engine: its table of layouts, and problems of how one checkpoint stores its weights.

A layout is a quantiser's names and a format: compressed-tensors' W4A16, ModelOpt's NVFP4. Engines make one product of
q, k and v, and one of gate and up, so the parts of these must be stored alike; and a device's slice of a product must
have whole groups and blocks of the numbers that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from dflash_serve.checkpoint.catalogue import EngineVerdict
from dflash_serve.checkpoint.config import DrafterConfig, expected_tensors, weight_bytes
from dflash_serve.checkpoint.quantization import LAYOUTS as NAMES
from dflash_serve.checkpoint.reader import Checkpoint, open_checkpoint
from dflash_serve.checkpoint.storage import GROUPS, TURNED, Format, Layout, Scheme
from dflash_serve.checkpoint.tensors import FUSED
from dflash_serve.errors import Problem

Layouts = Mapping[tuple[Layout, Format], EngineVerdict]
"""(quantiser, format) -> an engine's verdict; what is not there is refused."""
SERVED = EngineVerdict(verdict="served")
EVERY_LAYOUT: Layouts = {(layout, format): SERVED for layout in get_args(Layout) for format in get_args(Format)}
"""The table of an engine that dequantises what dflash-serve reads."""
DEQUANTISE = "`dflash-serve convert --dequantise` writes it in bf16"
SPLIT_BY_COLUMNS = ("o_proj", "down_proj")  # products whose input is split over devices; others' rows are
FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}


def after_convert(why: str) -> EngineVerdict:
    """The verdict on a layout that `convert --dequantise` mends."""
    return EngineVerdict(verdict="after convert", why=f"{why}; {DEQUANTISE}")


def layout_verdict(layouts: Layouts, layout: str | None, format: str, title: str) -> EngineVerdict:
    """The verdict on a layout.

    Args:
        layouts: the engine's table.
        layout: None = not known: the verdict that all layouts of the format share.
        format: of the weights; it may be one that dflash-serve does not read.
        title: the engine's name.
    """
    found = {one for (name, kind), one in layouts.items() if kind == format and layout in (None, name)}
    if len(found) == 1:
        return found.pop()
    if found:
        return EngineVerdict(verdict="not known", why=f"the quantiser of its {format} weights is not known")
    by = next((f" by {words}" for name, words in NAMES.items() if name == layout), "")
    return after_convert(f"its weights are {format}{by}, which dflash-serve does not hand to {title}")


def stored_bytes(checkpoint: Checkpoint | None, config: DrafterConfig) -> int:
    """Bytes of a drafter's weights in an engine: those of a quantised checkpoint, else of all its tensors in bf16. So
    they are where its weights are not here.
    """
    if checkpoint is None or checkpoint.quantization is None or not checkpoint.pieces:
        return weight_bytes(config)
    return sum(checkpoint.headers[name].bytes for name in {piece.stored_name for piece in checkpoint.pieces.values()})


def with_pieces(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint that `read_config` gave; a quantised one with its tensors, whose bytes and formats are asked for."""
    if checkpoint.quantization is None:
        return checkpoint
    return open_checkpoint(checkpoint.folder, block_size=checkpoint.config.block_size if checkpoint.config else None)


def product_formats(checkpoint: Checkpoint) -> dict[str, Format]:
    """The format of each product of the layers that is quantised alike in all of them, by its name there (`q_proj`)."""
    if checkpoint.config is None:
        return {}
    found: dict[str, list[Format]] = {}
    for module, scheme in checkpoint.quantised.items():
        found.setdefault(module.rpartition(".")[2], []).append(scheme.format)
    depth = checkpoint.config.num_layers
    return {name: each[0] for name, each in found.items() if len(each) == depth and len(set(each)) == 1}


def layout_problems(checkpoint: Checkpoint | None, layouts: Layouts, title: str, where: str) -> Iterator[Problem]:
    """The problem of a checkpoint in a layout that the engine does not load, or whose fused parts differ.

    Args:
        checkpoint: None = there is no drafter.
        layouts: the engine's table.
        title: the engine's name.
        where: the field or folder that names the drafter.
    """
    if checkpoint is None or checkpoint.quantization is None:
        return
    quantization = checkpoint.quantization
    found = layout_verdict(layouts, quantization.layout, quantization.format, title)
    if found.why is not None:
        what, _, do = found.why.partition("; ")
        yield Problem(what, where, do or DEQUANTISE)
        return
    yield from checkpoint.unshared
    if len(set(checkpoint.quantised.values())) > 1:
        yield Problem(f"its products are stored in several ways, and {title} has one rule for all", where, DEQUANTISE)
        return
    if "fc" in checkpoint.quantised and checkpoint.config is not None:
        ids = checkpoint.config.target_layer_ids
        if list(ids) != sorted(ids):
            yield Problem(f"fc is quantised, and its target_layer_ids {list(ids)} are not in order", where, DEQUANTISE)
    for fused, parts in FUSED.items():
        apart = _differing(checkpoint, checkpoint.quantised, parts)
        if apart is not None:
            what = f"{', '.join(parts)} of {apart} are stored in different ways, and {title} multiplies them as {fused}"
            yield Problem(what, where, DEQUANTISE)


def _differing(checkpoint: Checkpoint, found: Mapping[str, Scheme], parts: Sequence[str]) -> str | None:
    # The first parent module whose fused parts differ.
    parents = {name.removesuffix(f".{parts[0]}.weight") for name in _products(checkpoint) if f".{parts[0]}." in name}
    apart = (one for one in sorted(parents) if len({found.get(f"{one}.{part}") for part in parts}) > 1)
    return next(apart, None)


def _products(checkpoint: Checkpoint) -> list[str]:
    assert checkpoint.config is not None
    return [name for name in expected_tensors(checkpoint.config) if name.endswith("_proj.weight")]


def layers_differ(checkpoint: Checkpoint | None, title: str, where: str) -> Iterator[Problem]:
    """The problem of a product that is quantised in some layers only, where an engine has one rule for all layers."""
    if checkpoint is None or checkpoint.config is None:
        return
    found, kinds = checkpoint.quantised, dict[str, set[Scheme | None]]()
    if not found:
        return
    for name in _products(checkpoint):
        if name.startswith("layers."):
            module = name.removesuffix(".weight")
            kinds.setdefault(module.rpartition(".")[2], set()).add(found.get(module))
    apart = next((kind for kind, storage in kinds.items() if len(storage) > 1), None)
    if apart is not None:
        what = f"{apart} is not stored alike in all layers, and {title} has one rule for all of them"
        yield Problem(what, where, DEQUANTISE)


def input_scale_problems(checkpoint: Checkpoint, title: str, where: str) -> Iterator[Problem]:
    """The problem of a ModelOpt product with a scale of the tensor and none of its activations.

    SGLang fills it by the least number there is, and every product is 0 (modelopt_quant.py). `W4A16_NVFP4` needs none.
    """
    if checkpoint.quantization is not None and checkpoint.quantization.weights_alone:
        return
    for module, scheme in checkpoint.quantised.items():
        read = scheme.layout == "modelopt" and scheme.strategy == "tensor"
        if read and f"{module}.input_scale" not in checkpoint.pieces:
            what = f"{module} has no input_scale, which {title} needs of ModelOpt's {scheme.format.upper()}"
            yield Problem(what, where, "`dflash-serve convert --layout compressed-tensors` writes it without")
            return


def turned_problems(checkpoint: Checkpoint, title: str, where: str) -> Iterator[Problem]:
    """Problems of GPTQ's and AWQ's files, whose lists of modules in bf16 the engines read in ways of their own."""
    scheme = next(iter(checkpoint.quantised.values()), None)
    if scheme is None or scheme.layout not in TURNED:
        return
    by, repacks = NAMES[scheme.layout], "`dflash-serve convert` repacks it as compressed-tensors"
    modules = (name.removesuffix(".weight") for name in _products(checkpoint))
    dense = next((module for module in modules if module not in checkpoint.quantised), None)
    if dense is not None:
        yield Problem(f"{dense} is in bf16 beside {by}'s products, which is not told to {title}", where, repacks)
    if scheme.layout == "gptq" and not scheme.symmetric:
        yield Problem(f"its GPTQ weights have zero points (sym: false), which {title} does not read", where, repacks)


@dataclass(frozen=True)
class Grid:
    """Multiples that an engine's kernels ask of a device's part of a product."""

    rows: int = 1
    columns: int = 1


def slice_problems(
    checkpoint: Checkpoint | None, devices: int, title: str, grids: Mapping[Format, Grid] | None = None
) -> Iterator[Problem]:
    """Products of the decoder layers whose slices on a device have no whole groups, blocks or tiles of a kernel.

    Args:
        checkpoint: the drafter's.
        devices: over which each product is split.
        title: the engine's name.
        grids: format -> what the engine's kernels ask for beside whole groups.
    """
    if checkpoint is None or checkpoint.config is None:
        return
    shapes = expected_tensors(checkpoint.config)
    for module, scheme in checkpoint.quantised.items():
        product = module.rpartition(".")[2]
        if not module.startswith("layers."):
            continue
        rows, columns = shapes[f"{module}.weight"]
        by_columns = product in SPLIT_BY_COLUMNS
        rows, columns = (rows, columns // devices) if by_columns else (max(1, rows // devices), columns)
        if product in ("k_proj", "v_proj"):  # heads are repeated, not split further
            rows = max(rows, checkpoint.config.head_dim)
        grid = (grids or {}).get(scheme.format, Grid())
        group, high = _shared(scheme, columns), scheme.block[0] if scheme.format == "fp8-block" else 1
        fused = product in FUSED_OF
        for kind, size, units in (
            ("columns", columns, (group, grid.columns)),
            ("rows", rows, (high if fused or (devices > 1 and not by_columns) else 1, grid.rows)),
        ):
            unit = next((unit for unit in units if unit > 1 and size % unit), None)
            if unit is not None:
                what = f"{size} {kind} of {module} on a device are no multiple of {unit}, as {title} asks for"
                where = "parallel.tensor" if devices > 1 else "drafter.model"
                yield Problem(f"{what} of {scheme.format}", where, _fewer(devices))
                return


def _shared(scheme: Scheme, columns: int) -> int:
    """Columns that share a scale; 1 = a whole row does."""
    if scheme.format == "fp8-block":
        return scheme.block[1]
    found = scheme.group or GROUPS.get(scheme.format, 1)
    return found if found < columns or columns % found else 1


def _fewer(devices: int) -> str:
    return f"use fewer devices, or {DEQUANTISE}" if devices > 1 else DEQUANTISE

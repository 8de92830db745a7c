"""Holds a checkpoint's tensors against what its config.json asks for: each one found once, in the shape and dtype of
its storage format, with the scales that belong to it, and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects.heads import DO, head_of_tensor
from dflash_serve.checkpoint.headers import Header
from dflash_serve.checkpoint.tensors import (
    FLOATS,
    RECOMPUTED,
    SCALES,
    VOCABULARY_MAPS,
    is_packed,
    parts_of,
    stored_tensors,
)
from dflash_serve.errors import Problem

if TYPE_CHECKING:
    from dflash_serve.checkpoint.formats import Format

STORED_AS: Mapping[Format, str] = {"fp8": "F8_E4M3", "nvfp4": "U8"}
"""safetensors' dtype of a quantised weight."""
ONE_DRAFTER = "use weights and config.json of one drafter"


@dataclass(frozen=True)
class Piece:
    """One of our tensors: rows of a stored one, or all of it."""

    file: Path
    stored_name: str
    rows: slice | None = None


def match_tensors(
    headers: Mapping[str, Header],
    config: DrafterConfig,
    problems: list[Problem],
    *,
    where: str,
    copies: Collection[str] = (),
    format: Format | None = None,
) -> dict[str, Piece]:
    """Finds every expected tensor, scales included; adds what is missing, extra, misshapen or doubled to `problems`.

    Args:
        headers: what the files hold.
        config: what should be there.
        problems: added to.
        where: the folder, for what is missing.
        copies: names that repeat the target's own tensors in this dialect, and are skipped.
        format: of the quantised weights; None = the checkpoint does not say that it has any.
    """
    ours = {name: header for name, header in headers.items() if name not in copies and RECOMPUTED not in name}
    packed = next((name for name, h in ours.items() if is_packed(name, h.dtype) and not _is_map(name)), None)
    if format is None and packed is not None:  # every other complaint would be a consequence
        what = f"the weights are quantised (tensor {packed} is {ours[packed].dtype}), but no file of it says how"
        problems.append(Problem(what, str(ours[packed].file), "use the bf16 drafter, or add its hf_quant_config.json"))
        return {}
    return _Match(config, problems, format, _quantised_modules(ours, config, format)).run(ours, where)


def _quantised_modules(headers: Mapping[str, Header], config: DrafterConfig, format: Format | None) -> set[str]:
    """Modules whose weight is stored in `format`, by our names."""
    stored = [name for name, header in headers.items() if format is not None and header.dtype == STORED_AS[format]]
    parts = [part.name for name in stored if name.endswith(".weight") for part in parts_of(name, config)]
    return {name.removesuffix(".weight") for name in parts}


class _Match:
    """One matching: what is expected, and what was found of it."""

    def __init__(
        self, config: DrafterConfig, problems: list[Problem], format: Format | None, quantised: Collection[str]
    ) -> None:
        self.config, self.problems, self.format = config, problems, format
        self.shapes = stored_tensors(config, format, quantised)
        self.pieces: dict[str, Piece] = {}
        self.unusable: set[str] = set()

    def run(self, headers: Mapping[str, Header], where: str) -> dict[str, Piece]:
        """Matches every header, notes what is missing, and returns the tensors that can be used."""
        for name, header in headers.items():
            self._take(name, header)
        for name, shape in self.shapes.items():
            if name not in self.pieces and not name.endswith(".input_scale"):  # without it, weights alone are quantised
                self.problems.append(Problem(f"tensor {name} {list(shape)} is missing", where, ONE_DRAFTER))
        return {name: piece for name, piece in self.pieces.items() if name not in self.unusable}

    def _take(self, name: str, header: Header) -> None:
        parts = parts_of(name, self.config)
        if any(part.name not in self.shapes for part in parts):
            self._note(header, *self._extra(name, header))
            return
        shapes = [self.shapes[part.name] for part in parts]
        wanted = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
        fault = self._fault(name, header, wanted, parts[0].name)
        if fault:
            self._note(header, *fault)
        for part, shape in zip(parts, shapes, strict=True):
            if part.name in self.pieces:
                twice = f"tensor {part.name} is there twice: {self.pieces[part.name].stored_name} and {name}"
                self._note(header, twice, "keep one")
            start = part.start or 0
            rows = slice(start, start + shape[0]) if shape and len(parts) > 1 else None
            self.pieces[part.name] = Piece(header.file, name, rows)
            if fault:
                self.unusable.add(part.name)

    def _note(self, header: Header, what: str, do: str) -> None:
        self.problems.append(Problem(what, str(header.file), do))

    def _fault(self, name: str, header: Header, wanted: tuple[int, ...], ours: str) -> tuple[str, str] | None:
        """What is wrong with a tensor that belongs here, and what to do; a scale of one number may have any rank."""
        found = () if not wanted and prod(header.shape) == 1 else header.shape
        if found != wanted:
            return _misshapen(name, header.shape, wanted, self.config)
        module, _, leaf = ours.rpartition(".")
        good = FLOATS
        if self.format and leaf == "weight" and f"{module}.weight_scale" in self.shapes:
            good = {STORED_AS[self.format]}
        elif leaf == "weight_scale" and wanted:
            good = {"F8_E4M3"}
        if header.dtype in good:
            return None
        what = f"tensor {name} is {header.dtype}, not {' or '.join(sorted(good))} as {self.format or 'bf16'} drafters"
        return f"{what} store it", ONE_DRAFTER

    def _extra(self, name: str, header: Header) -> tuple[str, str]:
        head, shape = head_of_tensor(name), list(header.shape)
        if head is not None:
            return f"tensor {name} {shape} belongs to a {head} head, which is not supported yet", DO
        if _is_map(name):
            what = (
                f"tensor {name} {shape} maps a reduced draft vocabulary, which needs a head of its own; "
                "we, SGLang and TensorRT-LLM draft through the target's"
            )
            return what, "train with the full vocabulary"
        weights = [part.name.rpartition(".")[0] + ".weight" for part in parts_of(name, self.config)]
        if name.endswith(SCALES) and all(weight in self.shapes for weight in weights):
            return f"tensor {name} {shape} belongs to no quantised weight", ONE_DRAFTER
        return f"tensor {name} {shape} is not part of a DFlash drafter of this config.json", ONE_DRAFTER


def _is_map(name: str) -> bool:
    return name.removeprefix("model.") in VOCABULARY_MAPS


def _misshapen(name: str, shape: tuple[int, ...], wanted: tuple[int, ...], config: DrafterConfig) -> tuple[str, str]:
    what = f"tensor {name} has shape {list(shape)}, config.json asks for {list(wanted)}"
    if wanted != (config.hidden_size, config.feature_size):
        return what, ONE_DRAFTER
    what += f" = [hidden_size, {len(config.target_layer_ids)} target_layer_ids x hidden_size]"
    return what, f"correct target_layer_ids, or {ONE_DRAFTER}"

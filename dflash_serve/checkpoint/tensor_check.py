"""Holds a checkpoint's tensors against what its config.json asks for: each one found once, in shape, and no others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects.heads import DO, head_of_tensor
from dflash_serve.checkpoint.headers import Header
from dflash_serve.checkpoint.tensor_names import (
    RECOMPUTED,
    VOCABULARY_MAPS,
    expected_tensors,
    fused_shape,
    is_packed,
    parts_of,
)
from dflash_serve.errors import Problem


@dataclass(frozen=True)
class Piece:
    """One of our tensors: rows of a stored one."""

    file: Path
    stored_name: str
    rows: slice


def match_tensors(
    headers: Mapping[str, Header], config: DrafterConfig, copies: Collection[str], problems: list[Problem]
) -> dict[str, Piece]:
    """Finds every expected tensor, and adds what is missing, extra, misshapen, quantised or doubled to `problems`.

    Args:
        headers: what the files hold.
        config: what should be there.
        copies: names that repeat the target's own tensors in this dialect, and are skipped.
        problems: added to.
    """
    ours = {name: h for name, h in headers.items() if name not in copies and RECOMPUTED not in name}
    packed = next((name for name, h in ours.items() if is_packed(name, h.dtype) and not _is_map(name)), None)
    if packed is not None:  # every other complaint would be a consequence
        problems.append(
            Problem(
                f"the weights are quantised (tensor {packed} is {ours[packed].dtype}), which is not supported",
                str(ours[packed].file),
                "use the bf16 drafter",
            )
        )
        return {}
    shapes, pieces, misshapen = expected_tensors(config), dict[str, Piece](), set[str]()
    for name, header in ours.items():
        parts = parts_of(name, config)
        wanted = fused_shape(parts, shapes)
        if wanted is None:
            _extra(name, header, problems)
        elif wanted != header.shape:
            _misshapen(name, header, wanted, config, problems)
        for part in parts if wanted is not None else ():
            if part.name in pieces:
                twice = f"tensor {part.name} is there twice: {pieces[part.name].stored_name} and {name}"
                problems.append(Problem(twice, str(header.file), "keep one"))
            start = part.start or 0
            pieces[part.name] = Piece(header.file, name, slice(start, start + shapes[part.name][0]))
            if wanted != header.shape:
                misshapen.add(part.name)
    _missing(shapes, pieces, headers, problems)
    return {name: piece for name, piece in pieces.items() if name not in misshapen}


def _is_map(name: str) -> bool:
    return name.removeprefix("model.") in VOCABULARY_MAPS


def _extra(name: str, header: Header, problems: list[Problem]) -> None:
    head = head_of_tensor(name)
    shape = list(header.shape)
    if head is not None:
        what, do = f"tensor {name} {shape} belongs to a {head} head, which is not supported yet", DO
    elif _is_map(name):
        what = (
            f"tensor {name} {shape} maps a reduced draft vocabulary, which needs a head of its own; "
            "we, SGLang and TensorRT-LLM draft through the target's"
        )
        do = "train with the full vocabulary"
    else:
        what = f"tensor {name} {shape} is not part of a DFlash drafter of this config.json"
        do = "use weights and config.json of one drafter"
    problems.append(Problem(what, str(header.file), do))


def _misshapen(
    name: str, header: Header, wanted: tuple[int, ...], config: DrafterConfig, problems: list[Problem]
) -> None:
    what = f"tensor {name} has shape {list(header.shape)}, config.json asks for {list(wanted)}"
    do = "use weights and config.json of one drafter"
    if wanted == (config.hidden_size, config.feature_size):
        what += f" = [hidden_size, {len(config.target_layer_ids)} target_layer_ids x hidden_size]"
        do = "correct target_layer_ids, or use weights and config.json of one drafter"
    problems.append(Problem(what, str(header.file), do))


def _missing(
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Mapping[str, Piece],
    headers: Mapping[str, Header],
    problems: list[Problem],
) -> None:
    folder = next((str(header.file.parent) for header in headers.values()), "")
    for name, shape in shapes.items():
        if name not in pieces:
            what = f"tensor {name} {list(shape)} is missing"
            problems.append(Problem(what, folder, "use weights and config.json of one drafter"))

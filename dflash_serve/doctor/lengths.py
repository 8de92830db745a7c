"""Acceptance by context length: the length beyond which it falls, and limits of the drafter near it.

The figures are those of `evaluate --by length --output FILE`, or of a server whose prompts differ in length.
Of all cuts between two ranges, the one is taken where acceptance falls most, weighted by the steps on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_serve.answers.groups import length_range
from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.common.documents import read_json
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

LOST = 1 / 3  # Share of the accepted tokens whose loss counts: texts of several lengths differ in what they are about
FEWEST_STEPS = 50  # Steps on a side of a cut: with fewer, τ of most texts has a standard error above a tenth


class LengthFigures(NamedTuple):
    """Acceptance in one range of context lengths."""

    first: int  # Tokens of the shortest context of the range
    steps: float
    length: float  # Acceptance length


class Fall(NamedTuple):
    """A fall of acceptance."""

    beyond: int  # Context length in tokens, from which on it is lower
    before: float  # Acceptance length of shorter contexts
    after: float

    def __str__(self) -> str:
        return f"acceptance falls from {self.before:.2f} to {self.after:.2f} beyond {self.beyond:,} tokens"


def figures_of_report(path: Path) -> list[LengthFigures]:
    """The figures of a report of `evaluate --by length`.

    Raises:
        UserError: it is no such report.
    """
    report = read_json(path)
    try:
        ranges = report["by"]["length"]
        found = [
            LengthFigures(int(name.partition("-")[0]), float(one["steps"]), float(one["acceptance_length"]))
            for name, one in ranges.items()
            if one["steps"] and one["acceptance_length"] is not None
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        do = "give the JSON of `evaluate --by length --output FILE`"
        raise UserError("it has no acceptance by length", where=f"--survival {path}", do=do) from None
    return sorted(found)


def fall_of(figures: list[LengthFigures]) -> Fall | None:
    """The largest fall that counts; None = there is none."""
    best, strongest = None, 0.0
    for cut in range(1, len(figures)):
        (before, few), (after, many) = _mean(figures[:cut]), _mean(figures[cut:])
        strength = (before - after) * math.sqrt(few * many / (few + many))
        if min(few, many) >= FEWEST_STEPS and lost(before, after) and strength > strongest:
            best, strongest = Fall(figures[cut].first, before, after), strength
    return best


def lost(before: float, after: float) -> bool:
    """True if the second acceptance length is lower by a share that counts."""
    return after - 1 < (1 - LOST) * (before - 1)


def fall_of_prompts(
    each: Sequence[AcceptanceStatistics], sound: Sequence[AcceptanceStatistics], contexts: Sequence[int | None]
) -> tuple[Fall, str] | None:
    """The fall of a server's acceptance with the length of its prompts, and whose it is, in words.

    Args:
        each: the server's counts, by prompt.
        sound: counts that our own engine predicts for the same prompts.
        contexts: tokens of each prompt; None = unknown.
    """
    known = [tokens for tokens in contexts if tokens is not None]
    fall = fall_of(_by_range(known, each)) if len(known) == len(each) else None
    if fall is None:
        return None
    ours = _by_range(known, sound)
    parts = [one for one in ours if one.first < fall.beyond], [one for one in ours if one.first >= fall.beyond]
    if not all(parts):
        return fall, "of our own engine it is not known there"
    before, after = (_mean(part)[0] for part in parts)
    whose = "so the drafter's does" if lost(before, after) else "so the server's does"
    return fall, f"where that of our own engine is {before:.2f} and {after:.2f}, {whose}"


def _by_range(contexts: Sequence[int], each: Sequence[AcceptanceStatistics]) -> list[LengthFigures]:
    # the figures of counts by prompt, in the ranges of the prompts' lengths
    ranges = [length_range(tokens) for tokens in contexts]
    found = list[LengthFigures]()
    for name in set(ranges):
        counts = total([one for of, one in zip(ranges, each, strict=True) if of == name])
        if counts.verifications and counts.acceptance_length is not None:
            found.append(LengthFigures(int(name.partition("-")[0]), counts.verifications, counts.acceptance_length))
    return sorted(found)


def _mean(figures: list[LengthFigures]) -> tuple[float, float]:
    # acceptance length over all steps, and the steps
    steps = sum(one.steps for one in figures)
    return sum(one.length * one.steps for one in figures) / steps, steps


def causes(fall: Fall, drafter: DrafterConfig, draft_window: int | None) -> str:
    """Limits of the drafter within a factor of two of the length, in words; if there is none, other causes."""
    limits = list(_limits(drafter, draft_window))
    near = [f"{name} ({limit:,} tokens)" for limit, name in limits if fall.beyond / 2 <= limit <= fall.beyond * 2]
    if near:
        return f"{'limits near it are' if len(near) > 1 else 'a limit near it is'} {' and '.join(near)}"
    known = ", ".join(f"{name} {limit:,}" for limit, name in limits)
    return f"no limit of the drafter is near it ({known}): its training had few such contexts, or its RoPE is wrong"


def _limits(drafter: DrafterConfig, draft_window: int | None) -> Iterator[tuple[int, str]]:
    yield drafter.max_position_embeddings, "the drafter's positions"
    if drafter.rope.original_max_position_embeddings:
        yield drafter.rope.original_max_position_embeddings, "the positions that its RoPE was scaled from"
    for window in sorted({kind.window for kind in drafter.layers if kind.window}):
        yield window, "the window of its layers"
    if draft_window:
        yield draft_window, "speculation.draft_window"

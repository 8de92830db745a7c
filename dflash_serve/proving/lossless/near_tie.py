"""Where two greedy answers part: a near-tie that rounding may turn round, or a fault.

A verification passes a block of rows through the target where plain decoding passes one, so sums are taken in another
order and every log-probability carries noise. Where the two best tokens lie closer together than that noise, either may
come out; anywhere else a difference is a fault. The plain side is asked for the log-probabilities at the first
differing position, after the tokens that both sides agree on; the gap is log p(plain's token) - log p(the other's).

The bound (`plan.NOISE`) is not taken from the two sides that are compared, because a fault would widen its own bound.
It was measured: SmolLM2-135M on the embedded engine, blocks of 8 rows against single ones on a CPU with AMX, ten
prompts of the bundled set. The gap between two of the five best tokens moved by up to 7.6e-5 in float32 (375
positions), where the bound is four times that, and by up to 0.63 in bfloat16 (286 positions; answers parted at gaps of
at most 0.125), where it is a fifth more than that. In bfloat16 a fault that moves logits by less hides behind
near-ties: prove it in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_serve.client.answer import Answer
from dflash_serve.speculation.params import SamplingParams

TOP = 5
"""Tokens whose log-probabilities are asked for: a near-tie is never between more."""

Piece = str | int
Pieces = Sequence[Piece]
Kind = Literal["near-tie", "fault", "unstable", "unscored"]
"""unstable: the plain side does not repeat itself up to there; unscored: the engine does not say how close it was."""


def first_difference(a: Pieces, b: Pieces) -> int | None:
    """The first position at which two answers differ, the end counted; None if they are the same."""
    for position, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True)
class Scored:
    """An answer asked again with log-probabilities, seen at the position in question."""

    pieces: list[Piece]
    token: str
    """The text of the token there."""
    logprob: float
    top: dict[str, float]

    @classmethod
    def of(cls, answer: Answer, position: int) -> Scored | None:
        """None where the engine did not say."""
        if answer.logprobs is None or len(answer.logprobs) <= position:
            return None
        there = answer.logprobs[position]
        return cls(list(answer.pieces), there.token, there.logprob, dict(there.top))

    @classmethod
    def read(cls, value: Any) -> Scored | None:
        """From a journal."""
        return None if value is None else cls(**value)

    def says(self, piece: Piece | None, agreed: Pieces) -> bool:
        """Whether that piece comes after the agreed ones; an end (None) would have been this token."""
        position = len(agreed)
        if piece is None:
            return self.pieces[:position] == list(agreed)
        return self.pieces[position : position + 1] == [piece]


def again(params: SamplingParams, position: int) -> SamplingParams:
    """To ask for an answer again, up to a position; the end-of-sequence token shows as one."""
    return params.model_copy(update={"max_tokens": position + 1, "ignore_eos": True})


def classify(
    plain_answer: Pieces,
    other_answer: Pieces,
    position: int,
    plain: Scored | None,
    other: Scored | None,
    *,
    params: SamplingParams,
    noise: float,
) -> tuple[Kind, float | None]:
    """What a difference is, and its gap in nats (a lower bound where the other token is not among the best).

    Args:
        plain_answer, other_answer: as they came, without and with speculation.
        position: the first at which they differ.
        plain, other: both asked again.
        noise: the largest gap that rounding may turn round.
    """
    if plain is None:
        return "unscored", None
    agreed = plain_answer[:position]
    if plain.pieces[:position] != list(agreed):
        return "unstable", None
    here, there = _at(plain_answer, position), _at(other_answer, position)
    known = {**plain.top, plain.token: plain.logprob}
    own = _name(here, agreed, plain, other)
    if own is None or own not in known:
        return "unstable", None
    gap, exact = _gap(known, own, _name(there, agreed, other) or _name(there or "", agreed, plain))
    if gap is None:
        return "unscored", None
    if params.penalised:  # engines differ in whether penalties are in what they report
        penalised = gap - _penalty(agreed, here, params) + _penalty(agreed, there, params)
        gap = min(gap, penalised, key=abs if exact else None)
    if exact:
        return ("near-tie" if abs(gap) <= noise else "fault"), gap
    return ("fault" if gap > noise else "unscored"), gap


def _gap(known: dict[str, float], own: str, theirs: str | None) -> tuple[float | None, bool]:
    """log p(own) - log p(theirs), and whether it is exact or only the least that it can be."""
    if theirs in known:
        return known[own] - known[theirs], True
    others = sorted((value for name, value in known.items() if name != own), reverse=True)
    # Not named: at least the gap to the best other one. Named and not among the best: at least that to their last.
    return (known[own] - others[0 if theirs is None else -1] if others else None), False


def _at(pieces: Pieces, position: int) -> Piece | None:
    return pieces[position] if position < len(pieces) else None


def _name(piece: Piece | None, agreed: Pieces, *answers: Scored | None) -> str | None:
    """How the engine spells a piece: the first answer that has it there says so."""
    return next((answer.token for answer in answers if answer is not None and answer.says(piece, agreed)), None)


def _penalty(agreed: Pieces, piece: Piece | None, params: SamplingParams) -> float:
    """What presence and frequency take off a piece's logit after the agreed ones."""
    count = 0 if piece is None else list(agreed).count(piece)
    return params.presence_penalty * (count > 0) + params.frequency_penalty * count

"""Answers that must be the same token for token: where two part, and whether rounding may do that or it is a fault.

A verification passes a block of rows through the target where plain decoding passes one, so sums are taken in another
order and every log-probability carries noise. Where the two best tokens lie closer together than that noise, either may
come out: a near-tie. Anywhere else a difference is a fault. The plain side is asked for the log-probabilities at the
first differing position, after the tokens that both sides agree on; the gap is log p(plain's token) - log p(the
other's).

The bound (`questions.NOISE`) is not taken from the two sides that are compared, because a fault would widen its own
bound. It was measured: SmolLM2-135M on the embedded engine, blocks of 8 rows against single ones on a CPU with AMX, ten
prompts of the bundled set. The gap between two of the five best tokens moved by up to 7.6e-5 in float32 (375
positions), where the bound is four times that, and by up to 0.63 in bfloat16 (286 positions; answers parted at gaps of
at most 0.125), where it is a fifth more than that. In bfloat16 a fault that moves logits by less hides behind
near-ties: prove it in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from dflash_serve.client.endpoint import Reply
from dflash_serve.common.settings import Frozen
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.questions import Case

TOP = 5
"""Tokens whose log-probabilities are asked for: a near-tie is never between more."""

Piece = str | int
Pieces = Sequence[Piece]
Kind = Literal["near-tie", "fault", "unstable", "unscored"]
"""unstable: the plain side does not repeat itself up to there; unscored: the engine does not say how close it was."""


class Difference(Frozen):
    """Where two answers part."""

    prompt: int
    """From 1 on, in the order of the prompt set."""
    position: int
    """Where the first differing token is, from 0 on."""
    with_speculation: str | None
    """The token there; None = the answer had ended."""
    without_speculation: str | None
    gap: float | None
    """log p(token without) - log p(token with), by the plain side, in nats; None = it did not say."""
    kind: Kind


class TokenComparison(Frozen):
    """Both sides' answers to one case, compared token for token."""

    case: str
    prompts: int
    identical: int = 0
    tokens: int = 0
    """How many tokens the answers without speculation have."""
    compared: int = 0
    """How many of them stand before the first difference: what comes after it follows from it."""
    differences: tuple[Difference, ...] = ()
    refused: str | None = None
    """Why there are no answers, by the server that did not give them."""

    def of_kind(self, *kinds: Kind) -> int:
        return sum(difference.kind in kinds for difference in self.differences)


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer asked again with log-probabilities, seen at the position in question."""

    pieces: list[Piece]
    token: str
    """The text of the token there."""
    logprob: float
    top: dict[str, float]

    @classmethod
    def of(cls, reply: Reply, position: int) -> ScoredAnswer | None:
        """None where the engine did not say."""
        if reply.logprobs is None or len(reply.logprobs) <= position:
            return None
        there = reply.logprobs[position]
        return cls(list(reply.pieces), there.text, there.logprob, dict(there.top))

    def says(self, piece: Piece | None, agreed: Pieces) -> bool:
        """Whether that piece comes after the agreed ones; an end (None) would have been this token."""
        position = len(agreed)
        if piece is None:
            return self.pieces[:position] == list(agreed)
        return self.pieces[position : position + 1] == [piece]


@dataclass(frozen=True)
class AnswerPair:
    """Both sides' answers to one prompt, and what they said when asked again up to where they part."""

    plain: list[Piece]
    other: list[Piece]
    plain_scored: ScoredAnswer | None = None
    other_scored: ScoredAnswer | None = None

    @property
    def position(self) -> int | None:
        """The first at which they differ, the end counted; None if they are the same."""
        places = enumerate(zip_longest(self.plain, self.other))
        return next((position for position, (plain, other) in places if plain != other), None)


def compare_tokens(case: Case, pairs: Sequence[AnswerPair], noise: float) -> TokenComparison:
    """Every prompt's pair of answers.

    Args:
        noise: the largest gap that rounding may turn round, in nats.
    """
    positions = [pair.position for pair in pairs]
    return TokenComparison(
        case=case.name,
        prompts=len(pairs),
        identical=positions.count(None),
        tokens=sum(len(pair.plain) for pair in pairs),
        compared=sum(len(pair.plain) if p is None else p for pair, p in zip(pairs, positions, strict=True)),
        differences=tuple(
            _difference(index + 1, pair, position, case.params, noise)
            for index, (pair, position) in enumerate(zip(pairs, positions, strict=True))
            if position is not None
        ),
    )


def again(params: SamplingParams, position: int) -> SamplingParams:
    """What asks for an answer again, up to a position; the end-of-sequence token shows as one."""
    return params.model_copy(update={"max_tokens": position + 1, "ignore_eos": True})


def classify(pair: AnswerPair, position: int, *, params: SamplingParams, noise: float) -> tuple[Kind, float | None]:
    """What a difference is, and its gap in nats (a lower bound where the other token is not among the best).

    Args:
        position: the first at which the answers differ.
        params: of the case.
        noise: the largest gap that rounding may turn round.
    """
    plain, other = pair.plain_scored, pair.other_scored
    if plain is None:
        return "unscored", None
    agreed = pair.plain[:position]
    if plain.pieces[:position] != agreed:
        return "unstable", None
    here, there = ([*answer, None][position] for answer in (pair.plain, pair.other))
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


def _difference(prompt: int, pair: AnswerPair, position: int, params: SamplingParams, noise: float) -> Difference:
    kind, gap = classify(pair, position, params=params, noise=noise)
    return Difference(
        prompt=prompt,
        position=position,
        with_speculation=_shown(pair.other, position, pair.other_scored),
        without_speculation=_shown(pair.plain, position, pair.plain_scored),
        gap=gap,
        kind=kind,
    )


def _shown(pieces: Pieces, position: int, scored: ScoredAnswer | None) -> str | None:
    """A token for a reader: its number and, where the engine spelt it when asked again, its text."""
    if position >= len(pieces):
        return None
    piece = pieces[position]
    if scored is None or scored.pieces[position : position + 1] != [piece] or scored.token == piece:
        return str(piece)
    return f"{scored.token!r} ({piece})"


def _gap(known: dict[str, float], own: str, theirs: str | None) -> tuple[float | None, bool]:
    """log p(own) - log p(theirs), and whether it is exact or only the least that it can be."""
    if theirs in known:
        return known[own] - known[theirs], True
    others = sorted((value for name, value in known.items() if name != own), reverse=True)
    # Not named: at least the gap to the best other one. Named and not among the best: at least that to their last.
    return (known[own] - others[0 if theirs is None else -1] if others else None), False


def _name(piece: Piece | None, agreed: Pieces, *answers: ScoredAnswer | None) -> str | None:
    """How the engine spells a piece: the first answer that has it there says so."""
    return next((answer.token for answer in answers if answer is not None and answer.says(piece, agreed)), None)


def _penalty(agreed: Pieces, piece: Piece | None, params: SamplingParams) -> float:
    """What presence and frequency take off a piece's logit after the agreed ones."""
    count = sum(one == piece for one in agreed)
    return params.presence_penalty * (count > 0) + params.frequency_penalty * count

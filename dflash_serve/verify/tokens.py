"""Comparison of answers that must be equal token for token: the first difference of each pair, and its kind.

A verification passes a block of rows through the target and plain decoding passes one row, so sums are taken in another
order and every log-probability carries noise. If the two best tokens are closer together than that noise, either may be
chosen: a near-tie. Any other difference is a fault. The plain side is asked for the log-probabilities at the first
differing position, after the tokens on which both sides agree; the gap is log p(plain's token) - log p(the other's).
Where a server tells the prompt's token ids, prompt and agreed tokens are the prompt of that question. Otherwise the
whole question is asked again, and with rounding that depends on the batch a side may not repeat its own answer.

The bound (`questions.NOISE`) is not taken from the two sides that are compared, because a fault would widen its own
bound. It was measured with SmolLM2-135M on the embedded engine, blocks of 8 rows against single rows on a CPU with AMX,
ten prompts of the bundled set. The gap between two of the five best tokens moved by up to 7.6e-5 in float32 (375
positions); the bound is four times that. In bfloat16 it moved by up to 0.63 (286 positions; answers parted at gaps of
at most 0.125). With rounding that depends on the number of rows, as GPUs have it, and penalties, answers parted at a
gap of 0.875; the bound is a fifth more. A fault that moves logits by less than the bound of bfloat16 passes as a
near-tie: verify in float32 to find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from dflash_serve.client.endpoint import Reply
from dflash_serve.common.settings import Frozen
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.questions import Case

UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # What engines write for tokens that are no whole character; vLLM: nothing
TOP = 5  # Tokens whose log-probabilities are asked for; a near-tie is between the best ones

NOT_PENALISED = {"presence_penalty": 0.0, "frequency_penalty": 0.0}

Piece = str | int
Pieces = Sequence[Piece]
Kind = Literal["near-tie", "fault", "unstable", "unscored"]
"""unstable: the plain side does not repeat its own answer there; unscored: the engine reports no gap."""


class Difference(Frozen):
    """The first difference of two answers."""

    prompt: int  # From 1 on, in the order of the prompt set
    position: int  # Index of the first differing token, from 0
    with_speculation: str | None  # The token at that position; None = the answer had ended
    without_speculation: str | None
    gap: float | None  # log p(token without) - log p(token with), by the plain side, in nats; None = not reported
    kind: Kind


class TokenComparison(Frozen):
    """Both sides' answers to one case, compared token for token."""

    case: str
    prompts: int
    identical: int = 0
    tokens: int = 0  # Tokens of all answers without speculation
    compared: int = 0  # Number of these before the first difference of their answer; later ones are not compared
    differences: tuple[Difference, ...] = ()
    refused: str | None = None  # The server's reason for giving no answers

    def of_kind(self, *kinds: Kind) -> int:
        return sum(difference.kind in kinds for difference in self.differences)


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer asked again with log-probabilities, at one position."""

    pieces: list[Piece]
    token: str  # The text of the token at the position
    logprob: float
    top: dict[str, float]
    spelt: list[str | None] = field(default_factory=lambda: [None, None])
    """The tokens of both answers at the position, the plain side's first, as this side spells them; None = unknown."""

    @classmethod
    def of(cls, reply: Reply, position: int, agreed: Pieces = ()) -> ScoredAnswer | None:
        """The score at a position of an answer whose first tokens, `agreed`, were in the prompt; None: it has none."""
        position -= len(agreed)
        if reply.logprobs is None or len(reply.logprobs) <= position:
            return None
        there = reply.logprobs[position]
        return cls([*agreed, *reply.pieces], there.text, there.logprob, dict(there.top))

    def says(self, piece: Piece | None, agreed: Pieces) -> bool:
        """True if that piece follows the agreed ones; an end (None) stands for this token."""
        position = len(agreed)
        if piece is None:
            return self.pieces[:position] == list(agreed)
        return self.pieces[position : position + 1] == [piece]


@dataclass(frozen=True)
class AnswerPair:
    """Both sides' answers to one prompt, and their scores when asked again up to the first difference."""

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
        noise: the largest gap whose sign rounding may change, in nats.
    """
    differences, compared = [], 0
    for number, pair in enumerate(pairs, start=1):
        position = pair.position
        compared += len(pair.plain) if position is None else position
        if position is None:
            continue
        kind, gap = classify(pair, position, params=case.params, noise=noise)
        differences.append(
            Difference(
                prompt=number,
                position=position,
                with_speculation=_shown(pair.other, position, pair.other_scored),
                without_speculation=_shown(pair.plain, position, pair.plain_scored),
                gap=gap,
                kind=kind,
            )
        )
    return TokenComparison(
        case=case.name,
        prompts=len(pairs),
        identical=len(pairs) - len(differences),
        tokens=sum(len(pair.plain) for pair in pairs),
        compared=compared,
        differences=tuple(differences),
    )


def classify(pair: AnswerPair, position: int, *, params: SamplingParams, noise: float) -> tuple[Kind, float | None]:
    """The kind of a difference, and its gap in nats (a lower bound if the other token is not among the best).

    Args:
        position: the first at which the answers differ.
        params: of the case.
        noise: as in `compare_tokens`.
    """
    plain, other = pair.plain_scored, pair.other_scored
    if plain is None:
        return "unscored", None
    agreed = pair.plain[:position]
    if plain.pieces[:position] != agreed:
        return "unstable", None
    here, there = ([*answer, None][position] for answer in (pair.plain, pair.other))
    known = {**plain.top, plain.token: plain.logprob}
    own = plain.spelt[0] or _name(here, agreed, plain, other)
    if own is None or own not in known:  # a side that gives both tokens after the same ones shows that rounding decides
        return ("near-tie" if there is not None and plain.says(there, agreed) else "unstable"), None
    theirs = plain.spelt[1] or _name(there, agreed, other) or _name(there or "", agreed, plain)
    if theirs == own:  # two tokens cannot have one name, unless neither is a whole character
        theirs = None
    if any(not name or UNREADABLE in name for name in (own, *([theirs] if theirs in known else known))):
        return "unscored", None  # of the tokens of such a name one log-probability is told
    gap, exact = _gap(known, own, theirs)
    if gap is None:
        return "unscored", None
    if params.penalised:  # engines differ in whether penalties are in what they report
        penalised = gap - _penalty(agreed, here, params) + _penalty(agreed, there, params)
        gap = min(gap, penalised, key=abs if exact else None)
    if exact:
        wide: Kind = "fault" if plain.says(here, agreed) else "unstable"
        return ("near-tie" if abs(gap) <= noise else wide), gap
    return ("fault" if gap > noise else "unscored"), gap


def _shown(pieces: Pieces, position: int, scored: ScoredAnswer | None) -> str | None:
    # a token for a reader: its number and, if the engine spelt it when asked again, its text
    if position >= len(pieces):
        return None
    piece = pieces[position]
    if scored is None or scored.pieces[position : position + 1] != [piece] or scored.token == piece:
        return str(piece)
    return f"{scored.token!r} ({piece})"


def _gap(known: dict[str, float], own: str, theirs: str | None) -> tuple[float | None, bool]:
    # log p(own) - log p(theirs), and True if it is exact; otherwise it is a lower bound
    if theirs in known:
        return known[own] - known[theirs], True
    others = sorted((value for name, value in known.items() if name != own), reverse=True)
    # Not named: at least the gap to the best other one. Named and not among the best: at least that to their last.
    return (known[own] - others[0 if theirs is None else -1] if others else None), False


def _name(piece: Piece | None, agreed: Pieces, *answers: ScoredAnswer | None) -> str | None:
    # the engine's spelling of a piece, by the first answer that has it
    return next((answer.token for answer in answers if answer is not None and answer.says(piece, agreed)), None)


def penalties_as_bias(agreed: Pieces, params: SamplingParams) -> dict[int, float]:
    """The `logit_bias` that does what the presence and frequency penalties of the agreed tokens do to the next one."""
    return {piece: -_penalty(agreed, piece, params) for piece in agreed if isinstance(piece, int)}


def _penalty(agreed: Pieces, piece: Piece | None, params: SamplingParams) -> float:
    # the presence and frequency penalties of a piece after the agreed ones
    count = sum(one == piece for one in agreed)
    return params.presence_penalty * (count > 0) + params.frequency_penalty * count

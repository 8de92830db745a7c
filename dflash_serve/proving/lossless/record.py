"""What both sides answered, under the names that a journal keeps it by, and what they refused."""

from __future__ import annotations

from dflash_serve.client.answer import Answer
from dflash_serve.common.journal import Journal
from dflash_serve.errors import UserError
from dflash_serve.proving.lossless.near_tie import Piece, Scored, first_difference
from dflash_serve.proving.lossless.plan import Case, Plan
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

WITH, WITHOUT = "with", "without"
UNIT, ACCEPTED = "unit", "accepted"


class Record:
    """Answers by side, case and index; only refusals are forgotten when a verification ends."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.refused: dict[str, str] = {}
        """Case -> what the server said."""

    @property
    def unit(self) -> str:
        """What answers are made of: token ids, tokens, or characters."""
        return str(self.journal.get(UNIT, "nothing"))

    def missing(self, side: str, case: Case, count: int) -> list[int]:
        """Which of the first `count` answers there are not."""
        return [index for index in range(count) if _key(side, case, index) not in self.journal]

    def keep(self, side: str, case: Case, index: int, answer: Answer) -> None:
        """An answer.

        Raises:
            UserError: the sides name tokens in different ways, so everything would differ.
        """
        if answer.pieces:
            if UNIT not in self.journal:
                self.journal.put(UNIT, answer.unit)
            if self.unit != answer.unit:
                what = f"the side {side} speculation gives {answer.unit}, the other {self.unit}"
                raise UserError(what, where="verify", do="compare two servers of the same engine and version")
        self.journal.put(_key(side, case, index), list(answer.pieces))

    def answers(self, side: str, case: Case, count: int) -> list[list[Piece]]:
        """The first `count` of them."""
        return [self.journal[_key(side, case, index)] for index in range(count)]

    def is_scored(self, side: str, case: Case, index: int) -> bool:
        """Whether it was asked again, with log-probabilities."""
        return _again(side, case, index) in self.journal

    def keep_score(self, side: str, case: Case, index: int, scored: Scored | None) -> None:
        """What came of asking again; None = the engine did not say."""
        self.journal.put(_again(side, case, index), None if scored is None else vars(scored))

    def score(self, side: str, case: Case, index: int) -> Scored | None:
        """None where it is not known."""
        return Scored.read(self.journal.get(_again(side, case, index)))

    def differing(self, plan: Plan) -> list[tuple[Case, int, int]]:
        """(greedy case, prompt, first differing position) of all answers that both sides have given."""
        return [
            (case, index, position)
            for case in plan.greedy_cases
            if case.name not in self.refused
            for index, sides in enumerate(zip(*self.both(case, plan.prompts), strict=True))
            if (position := first_difference(*sides)) is not None
        ]

    def both(self, case: Case, count: int) -> tuple[list[list[Piece]], list[list[Piece]]]:
        """The answers without and with speculation."""
        return self.answers(WITHOUT, case, count), self.answers(WITH, case, count)

    def counting(self, now: AcceptanceStatistics) -> AcceptanceStatistics:
        """A run's acceptance and that of the interrupted runs before it; unknown where one's is."""
        if ACCEPTED in self.journal:
            now = total([AcceptanceStatistics.from_dict(self.journal[ACCEPTED]), now])
        self.journal.put(ACCEPTED, now.to_dict())
        return now

    def counted(self, engine: str | None) -> AcceptanceStatistics:
        """The acceptance that was kept."""
        if ACCEPTED not in self.journal:
            return AcceptanceStatistics.unknown(engine)
        return AcceptanceStatistics.from_dict(self.journal[ACCEPTED])


def _key(side: str, case: Case, index: int) -> str:
    return f"{side}/{case.name}/{index}"


def _again(side: str, case: Case, index: int) -> str:
    return f"{_key(side, case, index)}/again"

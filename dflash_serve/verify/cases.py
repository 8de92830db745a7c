"""Questions of a verification to one side, and the cases that a side refuses."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from dflash_serve.verify.questions import LONG, MIXED, Case, Question


class CaseQuestion(NamedTuple):
    """A question to one side."""

    case: Case
    number: int | None  # of the question among those of its case; None = a try, whose answer is not kept
    question: Question


class RefusedCases:
    """Cases that a server does not take; they are asked again by a resumed run."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # name of a case -> the server's reason
        self.failures = set[str]()  # refused cases that the plain side answered, and the other one failed to

    def __contains__(self, case: Case) -> bool:
        return case.name in self.reasons

    def add(self, case: Case, reason: str) -> None:
        """Refuses a case; a later reason replaces an earlier one."""
        self.reasons[case.name] = reason

    def withdraw(self, case: Case) -> None:
        """Takes a case again, after a refusal of one of its forms."""
        self.reasons.pop(case.name, None)

    def reason_of_need(self, case: Case) -> str | None:
        """The reason of the first refused case that this one is made from; None = there is none."""
        return next((self.reasons[name] for name in case.needs if name in self.reasons), None)

    @property
    def untested(self) -> set[str]:
        """Refused cases that did not fail. A mixed case tells nothing new if a case that it needs is refused, too."""
        follow = {case.name for case in MIXED if any(name in self.reasons for name in case.needs)}
        return self.reasons.keys() - self.failures - follow


def side_by_side(cases: Sequence[Sequence[CaseQuestion]]) -> list[CaseQuestion]:
    """The questions of all cases: long answers begin first, the others of a case are spread over the whole run."""
    ranked = [
        (0.0 if one.case is LONG else place / len(requests), one)
        for requests in cases
        for place, one in enumerate(requests)
    ]
    return [one for _, one in sorted(ranked, key=itemgetter(0))]

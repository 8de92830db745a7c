"""Acceptance statistics: counts of verified and accepted drafted tokens. Needs no torch.

One type for all sources: our own loop counts into it (`record`), engines' metrics are read into it, and every reported
figure is a quotient of its counts. A count that a source does not report is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

COUNTS = ("verifications", "drafted", "accepted", "offered_by_slot", "accepted_by_slot", "widths")


@dataclass
class AcceptanceStatistics:
    """Counts of requests' verifications; `+` adds two, `since` gives the difference of two readings."""

    verifications: float | None = 0
    """Steps of one request that verified at least one drafted token (width > 1)."""
    drafted: float | None = 0
    """Drafted tokens in these verifications, without anchors."""
    accepted: float | None = 0
    """Accepted drafted tokens, without bonus tokens."""
    offered_by_slot: list[float] | None = field(default_factory=list)
    """Steps that verified slot k, from slot 1 on."""
    accepted_by_slot: list[float] | None = field(default_factory=list)
    """Steps that accepted slot k, from slot 1 on."""
    widths: dict[int, float] | None = field(default_factory=dict)
    """Width with the anchor -> steps; 1 = without speculation."""
    engine: str | None = None
    """Engine whose metrics were read; None = our own loop."""
    reported_length: float | None = None
    """τ as reported by an engine without counts."""
    trimmed: bool = field(default=False, repr=False)
    """The engine verified an unknown part of each drafted block; `verifications` counts all steps with a draft."""
    drained: bool = field(default=False, repr=False)
    """The engine resets its counts at every reading, so these are counts since the reading before."""

    @classmethod
    def unknown(cls, engine: str | None = None, reported_length: float | None = None) -> AcceptanceStatistics:
        """Statistics without counts, with the τ that the engine reports."""
        return cls(None, None, None, None, None, None, engine, reported_length)

    @classmethod
    def of_usage(cls, tokens: float, accepted: float, rejected: float, answers: float = 1) -> AcceptanceStatistics:
        """Counts by the `usage` of answers, which has OpenAI's fields for predicted tokens.

        The first token of an answer is its prefill's; each other one is an accepted draft or the token of a step. So
        steps without a draft count as verifications. A server that counts accepted drafts behind the end of an answer
        has one step too few for each.

        Args:
            tokens: `completion_tokens` of the answers.
            accepted, rejected: their `accepted_prediction_tokens` and `rejected_prediction_tokens`.
        """
        drafted = accepted + rejected
        verifications = max(1.0, tokens - answers - accepted) if drafted else 0.0
        return replace(cls.unknown(), verifications=verifications, drafted=drafted, accepted=accepted)

    def record(self, width: int, accepted: int, steps: int = 1) -> None:
        """Counts `steps` steps that verified `width` slots and accepted `accepted` drafted tokens.

        Raises:
            ValueError: not 0 <= accepted < width.
        """
        if not 0 <= accepted < width:
            raise ValueError(f"accepted {accepted} of width {width}: need 0 <= accepted < width")
        assert self.widths is not None
        self.widths[width] = self.widths.get(width, 0) + steps
        if width == 1:
            return
        assert self.offered_by_slot is not None
        assert self.accepted_by_slot is not None
        self.verifications = (self.verifications or 0) + steps
        self.drafted = (self.drafted or 0) + steps * (width - 1)
        self.accepted = (self.accepted or 0) + steps * accepted
        for by_slot, reached in ((self.offered_by_slot, width - 1), (self.accepted_by_slot, accepted)):
            by_slot.extend([0] * (width - 1 - len(by_slot)))
            for slot in range(reached):
                by_slot[slot] += steps

    def __add__(self, other: AcceptanceStatistics) -> AcceptanceStatistics:
        """The sum; a count that is unknown in one is unknown in the sum."""
        return self._merged(other)

    def since(self, earlier: AcceptanceStatistics) -> AcceptanceStatistics:
        """The counts between two readings; all unknown if a counter decreased (a restart).

        A reading without verifications is the beginning: its unknown counts were 0.
        """
        if self.drained:
            return self
        if self.verifications is None:  # the engine reports τ of its last window
            drafted = _plus(self.drafted, earlier.drafted or 0, -1)
            return replace(self, drafted=drafted, accepted=_plus(self.accepted, earlier.accepted or 0, -1))
        if not earlier.verifications:
            zeros = AcceptanceStatistics()
            earlier = replace(earlier, **{name: getattr(earlier, name) or getattr(zeros, name) for name in COUNTS})
        between = self._merged(earlier, -1)
        totals = (between.verifications, between.drafted, between.accepted)
        by_slot = (*(between.offered_by_slot or ()), *(between.accepted_by_slot or ()))
        counts = (*totals, *by_slot, *(between.widths or {}).values())
        went_backwards = any(count is not None and count < 0 for count in counts)
        return AcceptanceStatistics.unknown(self.engine) if went_backwards else between

    def _merged(self, other: AcceptanceStatistics, sign: int = 1) -> AcceptanceStatistics:
        sums = {name: _plus(getattr(self, name), getattr(other, name), sign) for name in COUNTS}
        trimmed = self.trimmed or other.trimmed
        return AcceptanceStatistics(**sums, engine=self.engine or other.engine, trimmed=trimmed)

    @property
    def speculates(self) -> bool | None:
        """A drafted token was verified; None = unknown."""
        if self.verifications is None and self.drafted is None:
            return True if (self.reported_length or 0) > 1 else None
        return bool(self.verifications or self.drafted)

    @property
    def steps(self) -> float | None:
        """All steps, those without speculation (width 1) included."""
        return None if self.widths is None else sum(self.widths.values())

    @property
    def tokens(self) -> float | None:
        """Tokens gained in all steps, with bonus tokens."""
        return None if self.steps is None or self.accepted is None else self.steps + self.accepted

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens per step over all steps, also those without speculation."""
        return _ratio(self.tokens, self.steps)

    @property
    def acceptance_length(self) -> float | None:
        """τ: mean tokens gained per verification of a drafted token, with the bonus token; 1 <= τ <= B."""
        gained = _ratio(self.accepted, self.verifications)
        return self.reported_length if gained is None else 1 + gained

    @property
    def acceptance_lengths(self) -> dict[int, float] | None:
        """Histogram: acceptance length -> verifications."""
        if self.verifications is None or self.accepted_by_slot is None:
            return None
        reached = [self.verifications, *self.accepted_by_slot, 0]
        counts = {length: reached[length - 1] - reached[length] for length in range(1, len(reached))}
        return {length: count for length, count in counts.items() if count}

    def survival(self, block_size: int | None = None) -> list[float | None]:
        """P(slot k is accepted) for k = 1..B-1, over the steps whose width covered slot k; None = unknown.

        With widths that a policy chose, slots are not comparable: a policy takes wide steps when it expects acceptance.

        Args:
            block_size: B; None = as many slots as were ever verified.
        """
        known = [_ratio(ok, n) for ok, n in zip(self.accepted_by_slot or (), self.offered_by_slot or (), strict=False)]
        wanted = sum(share is not None for share in known) if block_size is None else block_size - 1
        return (known + [None] * wanted)[:wanted]

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON values; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AcceptanceStatistics:
        """The inverse of `to_dict`; the keys of `widths` may be strings, as in JSON.

        Raises:
            TypeError, ValueError: `data` is not a result of `to_dict`.
        """
        widths = data.get("widths")
        return cls(**{**data, "widths": widths and {int(width): steps for width, steps in widths.items()}})


def total(many: Iterable[AcceptanceStatistics]) -> AcceptanceStatistics:
    """The sum of all; if the counts of any are unknown, only the mean of the lengths."""
    each = list(many)
    if all(one.verifications is not None for one in each):
        return sum(each, start=AcceptanceStatistics())
    lengths = [one.acceptance_length for one in each if one.acceptance_length is not None]
    engine = next((one.engine for one in each if one.engine), None)
    return AcceptanceStatistics.unknown(engine, sum(lengths) / len(lengths) if lengths else None)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _plus(a: Any, b: Any, sign: int = 1) -> Any:
    """a + sign * b, for each slot or width if there are several; None if either is unknown."""
    if a is None or b is None:
        return None
    if isinstance(a, dict):
        sums = {width: a.get(width, 0) + sign * b.get(width, 0) for width in sorted(a | b)}
        return {width: count for width, count in sums.items() if count}
    if isinstance(a, list):
        return [x + sign * y for x, y in zip_longest(a, b, fillvalue=0)]
    return a + sign * b

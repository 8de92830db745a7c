"""What one server says of its speculation, and what happened between two such readings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class AcceptanceReading:
    """What one server says of its speculation. Unknown is None, never 0. A step is one request's verification."""

    steps: float | None = None
    """Verifications of at least one drafted token."""
    drafted: float | None = None
    """Drafted tokens put to the test, anchors not counted."""
    accepted: float | None = None
    """Those of them that were accepted, bonus tokens not counted."""
    survival: Numbers | None = None
    """P(slot k is accepted) from slot 1 on, over the steps that verified it; as far as known."""
    acceptance_length: float | None = None
    """Tokens gained per verification, the bonus token counted."""
    engine: str | None = None
    """Whose metrics these are."""
    widths: Mapping[int, float] | None = None
    """Steps by width, the anchor counted; 1 = without speculation."""
    offered_by_slot: Numbers | None = field(default=None, repr=False)
    accepted_by_slot: Numbers | None = field(default=None, repr=False)
    drained: bool = field(default=False, repr=False)
    """The engine forgets what it has told: this is what happened since the reading before."""

    def since(self, earlier: AcceptanceReading) -> AcceptanceReading:
        """What happened between two readings; all unknown where the counters went backwards (a restart)."""
        if self.drained or self.steps is None:
            return self  # a gauge: the engine's own word on its last window
        if any(_below(now, then) for now, then in _counters(self, earlier)):
            return AcceptanceReading(engine=self.engine)
        return counted(
            self.engine,
            self.steps - (earlier.steps or 0.0),
            _minus(self.drafted, earlier.drafted),
            _minus(self.accepted, earlier.accepted),
            offered=_minus_each(self.offered_by_slot, earlier.offered_by_slot),
            survived=_minus_each(self.accepted_by_slot, earlier.accepted_by_slot),
            widths=_minus_widths(self.widths, earlier.widths),
        )


def counted(
    engine: str | None,
    steps: float | None,
    drafted: float | None,
    accepted: float | None,
    *,
    offered: Numbers | None = None,
    survived: Numbers | None = None,
    widths: Mapping[int, float] | None = None,
    drained: bool = False,
) -> AcceptanceReading:
    """A reading from counts: the quotients follow.

    Args:
        engine: whose metrics.
        steps: verifications of at least one drafted token.
        drafted: drafted tokens put to the test.
        accepted: of them.
        offered: drafted, by slot from 1 on.
        survived: accepted, by slot from 1 on.
        widths: steps by width.
        drained: see AcceptanceReading.
    """
    length = 1 + accepted / steps if steps and accepted is not None else None
    survival = None if offered is None or survived is None else _survival(offered, survived)
    return AcceptanceReading(
        steps, drafted, accepted, survival, length, engine, widths, offered or None, survived or None, drained
    )


def merged(readings: Sequence[AcceptanceReading]) -> AcceptanceReading:
    """Several spans as one: counts are added; where any span's are unknown, only the mean length is left."""
    engine = next((reading.engine for reading in readings if reading.engine), None)
    if not readings or any(reading.steps is None for reading in readings):
        lengths = [reading.acceptance_length for reading in readings if reading.acceptance_length is not None]
        return AcceptanceReading(acceptance_length=sum(lengths) / len(lengths) if lengths else None, engine=engine)
    return counted(
        engine,
        _sum([reading.steps for reading in readings]),
        _sum([reading.drafted for reading in readings]),
        _sum([reading.accepted for reading in readings]),
        offered=_sum_each([reading.offered_by_slot for reading in readings]),
        survived=_sum_each([reading.accepted_by_slot for reading in readings]),
        widths=_sum_widths([reading.widths for reading in readings]),
    )


def _sum(counts: Sequence[float | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _sum_each(spans: Sequence[Numbers | None]) -> Numbers | None:
    known = [span for span in spans if span is not None]
    return tuple(map(sum, zip_longest(*known, fillvalue=0.0))) if known else None


def _sum_widths(spans: Sequence[Mapping[int, float] | None]) -> dict[int, float] | None:
    total: dict[int, float] = {}
    for span in spans:
        for width, count in (span or {}).items():
            total[width] = total.get(width, 0.0) + count
    return dict(sorted(total.items())) if any(span is not None for span in spans) else None


def _survival(offered: Numbers, survived: Numbers) -> Numbers | None:
    """Up to the first slot that was never offered: beyond it nothing is known."""
    known: list[float] = []
    for put, stood in zip(offered, survived, strict=False):
        if not put:
            break
        known.append(stood / put)
    return tuple(known) or None


def _counters(now: AcceptanceReading, then: AcceptanceReading) -> Iterator[tuple[float | None, float | None]]:
    yield from ((now.steps, then.steps), (now.drafted, then.drafted), (now.accepted, then.accepted))


def _below(now: float | None, then: float | None) -> bool:
    return then is not None and (now is None or now < then)


def _minus(now: float | None, then: float | None) -> float | None:
    return None if now is None else now - (then or 0.0)


def _minus_each(now: Numbers | None, then: Numbers | None) -> Numbers | None:
    if now is None:
        return None
    before = (*(then or ()), *(0.0,) * len(now))
    return tuple(count - earlier for count, earlier in zip(now, before, strict=False))


def _minus_widths(now: Mapping[int, float] | None, then: Mapping[int, float] | None) -> dict[int, float] | None:
    if now is None:
        return None
    spent = {width: count - (then or {}).get(width, 0.0) for width, count in now.items()}
    return {width: count for width, count in spent.items() if count}

"""What acceptance was: every figure follows from how often each (width, accepted) occurred. Needs no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class AcceptanceStatistics:
    """Tallies of steps, mergeable with `+`. A step here is one request's share of a verification.

    A figure that is not known is None, never 0.
    """

    tally: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(width, accepted) -> number of steps."""

    def record(self, width: int, accepted: int, steps: int = 1) -> None:
        """Count `steps` steps that verified `width` slots and accepted `accepted` drafted tokens.

        Raises:
            ValueError: not 0 <= accepted < width.
        """
        if not 0 <= accepted < width:
            raise ValueError(f"accepted {accepted} of width {width}: need 0 <= accepted < width")
        self.tally[width, accepted] += steps

    def __add__(self, other: "AcceptanceStatistics") -> "AcceptanceStatistics":
        return AcceptanceStatistics(self.tally + other.tally)

    @property
    def steps(self) -> int:
        return self.tally.total()

    @property
    def tokens(self) -> int:
        """Tokens gained in all steps, bonus tokens counted."""
        return sum((accepted + 1) * steps for (_, accepted), steps in self.tally.items())

    @property
    def tokens_per_step(self) -> float | None:
        """Over all steps, those without speculation (width 1) included: what throughput sees."""
        return _ratio(self.tokens, self.steps)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens gained per step that verified a drafted token (width > 1): what the drafter is worth."""
        speculated = {key: steps for key, steps in self.tally.items() if key[0] > 1}
        return _ratio(sum((accepted + 1) * n for (_, accepted), n in speculated.items()), sum(speculated.values()))

    @property
    def acceptance_lengths(self) -> dict[int, int]:
        """Histogram: acceptance_length -> steps, over steps of width > 1."""
        return _sum_by((accepted + 1, n) for (width, accepted), n in self.tally.items() if width > 1)

    @property
    def widths(self) -> dict[int, int]:
        """Histogram: width -> steps."""
        return _sum_by((width, n) for (width, _), n in self.tally.items())

    def survival(self, block_size: int) -> list[float | None]:
        """P(slot k is accepted) for k = 1..B-1, over the steps whose width covered slot k; None if there were none.

        With widths that a policy chose, compare slots with care: the wide steps are those that looked promising.
        """
        return [self._slot_survival(slot) for slot in range(1, block_size)]

    def _slot_survival(self, slot: int) -> float | None:
        offered = {key: steps for key, steps in self.tally.items() if key[0] > slot}
        return _ratio(sum(n for (_, accepted), n in offered.items() if accepted >= slot), sum(offered.values()))

    def to_dict(self) -> dict[str, list[list[int]]]:
        """For JSON: the tallies as [width, accepted, steps]."""
        return {"tally": [[width, accepted, n] for (width, accepted), n in sorted(self.tally.items())]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Iterable[Iterable[int]]]) -> "AcceptanceStatistics":
        """The inverse of `to_dict`.

        Raises:
            KeyError, ValueError: `data` is not what `to_dict` gives.
        """
        statistics = cls()
        for width, accepted, steps in data["tally"]:
            statistics.record(width, accepted, steps)
        return statistics


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _sum_by(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    result: Counter[int] = Counter()
    for key, count in pairs:
        result[key] += count
    return dict(sorted(result.items()))

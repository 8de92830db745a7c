"""Prometheus metrics beside SGLang's own, on the same /metrics: acceptance by slot, widths, the drafter's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PREFIX = "dflash_serve:"
SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)


class Metrics:
    """Counts; what is derived (acceptance length, survival) is a quotient of rates, taken where it is read.

    Survival of slot k = slots_accepted{slot="k"} / slots_offered{slot="k"};
    acceptance length = 1 + sum slots_accepted / steps over widths > 1.
    """

    def __init__(self, model_name: str) -> None:
        from prometheus_client import Counter, Histogram

        def counter(name: str, what: str, *labels: str) -> Any:
            return Counter(PREFIX + name, what, ["model_name", *labels])

        self._model = model_name
        self._offered = counter("slots_offered", "Drafted tokens put to the test, by slot of the block.", "slot")
        self._accepted = counter("slots_accepted", "Drafted tokens that were accepted, by slot of the block.", "slot")
        self._steps = counter("steps", "Verifications of one request, by width (the anchor counted).", "width")
        self._drafting = Histogram(
            f"{PREFIX}draft_seconds", "Time of one drafter pass over a batch.", ["model_name"], buckets=SECONDS
        )

    def verified(self, width: int, accepted: Sequence[tuple[str, int]]) -> None:
        """Counts a step."""
        if not accepted:
            return
        self._steps.labels(self._model, str(width)).inc(len(accepted))
        for slot in range(1, width):
            self._offered.labels(self._model, str(slot)).inc(len(accepted))
            self._accepted.labels(self._model, str(slot)).inc(sum(count >= slot for _, count in accepted))

    def drafted(self, seconds: float) -> None:
        """Counts a drafter pass."""
        self._drafting.labels(self._model).observe(seconds)

"""Counters of slots and widths that our plug-ins put beside an engine's own metrics: how they are written and read.

Survival of slot k = slots_accepted{slot="k"} / slots_offered{slot="k"}; acceptance length = 1 + sum of slots_accepted /
steps of widths greater than 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

from dflash_serve.backend import SpeculationLines
from dflash_serve.common.prometheus import Samples, rate
from dflash_serve.speculation.statistics import AcceptanceStatistics

PREFIX = "dflash_serve:"
STEPS, OFFERED, ACCEPTED = f"{PREFIX}steps", f"{PREFIX}slots_offered", f"{PREFIX}slots_accepted"
"""Names without the `_total` that they are exported with."""
COUNTERS = {
    STEPS: ("width", "Decoding steps of one request, by width (the anchor counted; 1 = no draft)."),
    OFFERED: ("slot", "Drafted tokens that were verified, by slot of the block."),
    ACCEPTED: ("slot", "Drafted tokens that were accepted, by slot of the block."),
}
"""Name -> label and help."""
SPECULATING = ', width!="1"'  # selects the steps that verified at least one drafted token
LINES = SpeculationLines(
    acceptance_length=(
        "{{pod}}",
        f"1 + {rate(f'{ACCEPTED}_total', by='pod')} / {rate(f'{STEPS}_total', by='pod', extra=SPECULATING)}",
    ),
    survival=("slot {{slot}}", f"{rate(f'{ACCEPTED}_total', by='slot')} / {rate(f'{OFFERED}_total', by='slot')}"),
    widths=("width {{width}}", rate(f"{STEPS}_total", by="width")),
)


class SlotCounters:
    """The counters of one engine in this process. Needs prometheus_client.

    Those of whole blocks stand at 0 from the start: where drafts never pay, a dashboard shows 0 and not that data lack.

    Args:
        labels: of all series, by name.
    """

    def __init__(self, block_size: int, **labels: str) -> None:
        self._series = cache(lambda name, place: _counter(name, *labels).labels(*labels.values(), str(place)))
        for name, place in [(STEPS, block_size), *product((OFFERED, ACCEPTED), range(1, block_size))]:
            self._series(name, place)

    def count(self, steps: Mapping[int, int], offered: Mapping[int, int], accepted: Mapping[int, int]) -> None:
        """Adds steps by width, and drafted tokens by slot, from 1 on."""
        for name, counts in ((STEPS, steps), (OFFERED, offered), (ACCEPTED, accepted)):
            for place, count in counts.items():
                if count > 0:
                    self._series(name, place).inc(count)


@cache
def _counter(name: str, *labels: str) -> Any:  # one for all engines of this process
    from prometheus_client import Counter

    label, about = COUNTERS[name]
    return Counter(name, about, [*labels, label])


def read_slot_counters(samples: Samples, engine: str, prefix: str) -> AcceptanceStatistics | None:
    """Acceptance by these counters; None = the page has none of them, or is not this engine's.

    Args:
        engine: its name in messages.
        prefix: of the engine's own metrics.
    """
    widths = samples.by(f"{STEPS}_total", "width")
    if not widths or not samples.knows(prefix):
        return None
    offered, accepted = (samples.by_slot(f"{name}_total", "slot", first=1) for name in (OFFERED, ACCEPTED))
    verifications = sum(count for width, count in widths.items() if width > 1)
    title = f"{engine} with dflash-serve"
    return AcceptanceStatistics(verifications, sum(offered), sum(accepted), offered, accepted, widths, title)

"""Counters of slots and widths, on every server of ours that counts them: how they are written and read.

Slots are counted from 1 on: the anchor is slot 0. Survival of slot k = slots_accepted{slot="k"} /
slots_offered{slot="k"}; acceptance length = 1 + sum of slots_accepted / steps of widths other than 1.

Where an engine trims drafted blocks and does not tell which slots it verified, its steps with a draft have the width
`trimmed`, and no slot is offered: survival is unknown, not low.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

from dflash_serve.adapter.facts import Line, SpeculationLines
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
GAINED, EXPECTED = f"{PREFIX}tokens_gained", f"{PREFIX}tokens_expected"
PACE = {
    GAINED: "Tokens of decoding steps under `width: auto`, without those that followed an idle time.",
    EXPECTED: "Tokens that the width policy expected in the same time, at the same batch.",
}
"""Counters whose quotient is the speculative headroom (`Pace`), by name: their help."""
TRIMMED = "trimmed"  # Width of a step with a draft of which the engine verified an unknown part
COPIES = ("tp_rank", "pp_rank", "moe_ep_rank")  # Labels of SGLang's ranks that run the same requests
SPECULATING = ', width!="1"'  # selects the steps that verified at least one drafted token
LINES = SpeculationLines(
    acceptance_length=(
        "{{pod}}",
        f"1 + {rate(f'{ACCEPTED}_total', by='pod')} / {rate(f'{STEPS}_total', by='pod', extra=SPECULATING)}",
    ),
    survival=("slot {{slot}}", f"{rate(f'{ACCEPTED}_total', by='slot')} / {rate(f'{OFFERED}_total', by='slot')}"),
    widths=("width {{width}}", rate(f"{STEPS}_total", by="width")),
    headroom=("{{pod}}", f"{rate(f'{GAINED}_total', by='pod')} / {rate(f'{EXPECTED}_total', by='pod')}"),
)


def where_absent(earlier: Mapping[str, Line]) -> SpeculationLines:
    """Lines by earlier names of these metrics, drawn only where no server has today's names."""
    new: dict[str, Line] = vars(LINES)
    return SpeculationLines(**{name: (old[0], f"{old[1]} unless {new[name][1]}") for name, old in earlier.items()})


def renamed(prefix: str) -> dict[str, Line]:
    """The lines of these metrics by another prefix."""
    names = ("acceptance_length", "survival", "widths")  # a later release added the headroom
    lines: dict[str, Line] = {name: vars(LINES)[name] for name in names}
    return {name: (legend, query.replace(PREFIX, prefix)) for name, (legend, query) in lines.items()}


class SlotCounters:
    """The counters of one engine in this process. Needs prometheus_client.

    Those of whole blocks stand at 0 from the start: where drafts never pay, a dashboard shows 0 and not that data lack.

    Args:
        trims: the engine verifies an unknown part of each block.
        earlier: prefix that their names had, under which they are counted, too.
        labels: of all series, by name.
    """

    def __init__(self, block_size: int, *, trims: bool = False, earlier: str | None = None, **labels: str) -> None:
        prefixes = [PREFIX] if earlier is None else [PREFIX, earlier]

        def series(name: str, place: int | str) -> list[Any]:
            return [_counter(name, one, *labels).labels(*labels.values(), str(place)) for one in prefixes]

        self._series = cache(series)
        self._series(STEPS, TRIMMED if trims else block_size)
        for name, place in product((ACCEPTED,) if trims else (OFFERED, ACCEPTED), range(1, block_size)):
            self._series(name, place)

    def count(self, steps: Mapping[Any, int], offered: Mapping[int, int], accepted: Mapping[int, int]) -> None:
        """Adds steps by width (a number, or `TRIMMED`), and drafted tokens by slot, from 1 on."""
        given: tuple[tuple[str, Mapping[Any, int]], ...] = ((STEPS, steps), (OFFERED, offered), (ACCEPTED, accepted))
        for name, counts in given:
            for place, count in counts.items():
                if count > 0:
                    for series in self._series(name, place):
                        series.inc(count)


class PaceCounters:
    """The counters of the headroom in this process, which stand at 0 from the start. Needs prometheus_client."""

    def __init__(self, **labels: str) -> None:
        self._series = [_plain_counter(name, *labels).labels(*labels.values()) for name in PACE]
        self._written = (0.0, 0.0)

    def write(self, gained: float, expected: float) -> None:
        """Adds what these counts have grown by since the last call."""
        for series, now, then in zip(self._series, (gained, expected), self._written, strict=True):
            series.inc(max(0.0, now - then))
        self._written = gained, expected


def read_pace(samples: Samples) -> tuple[float, float] | None:
    """Tokens gained and expected since the server started; None = it has no such counters."""
    gained, expected = (samples.total(f"{name}_total") for name in PACE)
    return None if gained is None or expected is None else (gained, expected)


def counted_once(samples: Samples, name: str | None) -> float | None:
    """A gauge's sum over a server's data-parallel ranks, each counted once; None if there is no such sample.

    SGLang's priority scheduling gives the requests of each priority beside the total, whose priority is empty, and
    --enable-metrics-for-all-schedulers gives the gauges of a data-parallel rank once for each rank of its group.
    """
    groups = dict[frozenset[tuple[str, str]], float]()
    for labels, count in samples.named(name or ""):
        if not labels.get("priority"):
            group = frozenset(label for label in labels.items() if label[0] not in COPIES)
            groups[group] = max(count, groups.get(group, 0.0))
    return sum(groups.values()) if groups else None


def slot_counts(counts: AcceptanceStatistics, block_size: int) -> dict[str, dict[int, float]]:
    """The counters' values of known counts, by name, then by width or slot; those of whole blocks from 0 on.

    Args:
        block_size: B; 1 = nothing is drafted.
    """
    slots = dict.fromkeys(range(1, block_size), 0.0)
    offered, accepted = (
        slots | dict(enumerate(each or (), start=1)) for each in (counts.offered_by_slot, counts.accepted_by_slot)
    )
    return {STEPS: {block_size: 0.0, **(counts.widths or {})}, OFFERED: offered, ACCEPTED: accepted}


@cache
def _counter(name: str, prefix: str, *labels: str) -> Any:  # one for all engines of this process
    from prometheus_client import Counter

    label, about = COUNTERS[name]
    return Counter(name.replace(PREFIX, prefix), about, [*labels, label])


@cache
def _plain_counter(name: str, *labels: str) -> Any:
    from prometheus_client import Counter

    return Counter(name, PACE[name], labels)


def read_slot_counters(samples: Samples, title: str, prefix: str) -> AcceptanceStatistics | None:
    """Acceptance by these counters; None = the page has none of them, or is not this engine's.

    Args:
        title: the engine's name in messages.
        prefix: of the engine's own metrics.
    """
    widths = samples.by(f"{STEPS}_total", "width")
    trimmed = [count for labels, count in samples.named(f"{STEPS}_total") if labels.get("width") == TRIMMED]
    if not (widths or trimmed) or not samples.knows(prefix):
        return None
    offered, accepted = (samples.by_slot(f"{name}_total", "slot", first=1) for name in (OFFERED, ACCEPTED))
    verifications = sum(count for width, count in widths.items() if width > 1) + sum(trimmed)
    if trimmed:
        return AcceptanceStatistics(verifications, None, sum(accepted), None, accepted, None, title, trimmed=True)
    return AcceptanceStatistics(verifications, sum(offered), sum(accepted), offered, accepted, widths, title)

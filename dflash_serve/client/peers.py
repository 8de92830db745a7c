"""Workers behind a router, compared: the ones that are slower, or accept less, than their peers.

A worker's samples are means over separate pieces of its work: the prompts that the doctor asked, or `STRETCH`
intervals of `top`. The samples of one worker are held against those of all its peers by Welch's one-sided t-test of
their logarithms. With k workers one is named if p < `LEVEL` / k and its geometric mean is lower by `LEAST` or more. Of
workers that are alike one is then named in at most `LEVEL` of all looks at independent samples; `top` looks again after
every interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from dflash_serve.client.metrics import LiveFigures
from dflash_serve.speculation.statistics import AcceptanceStatistics

LEVEL = 0.01  # Rate of false alarms of one look at workers that are alike
LEAST = 0.05  # A smaller difference is not worth a line, however certain it is
FEW = 5  # Least samples of a worker, and of its peers
STRETCH = 5  # Intervals of `top` in a sample: answers outlast an interval, so single ones are not independent
RESOLUTION = 1e-3  # Least standard deviation of a logarithm: figures are differences of counters


@dataclass(frozen=True)
class Laggard:
    """A worker that is behind its peers."""

    worker: str
    what: str  # The figure
    own: float  # Geometric mean of the worker's samples
    peers: float  # That of its peers' samples
    p_value: float

    def __str__(self) -> str:
        share = 1 - self.own / self.peers
        beside = f"{self.own:.2f}, its peers' {self.peers:.2f}"
        return f"{self.worker} is behind its peers: {self.what} {beside}, {share:.0%} lower (p = {self.p_value:.1g})"


def laggards(samples: Mapping[str, Sequence[float]], what: str) -> list[Laggard]:
    """The workers whose samples are lower than those of their peers.

    Args:
        samples: positive, by worker; workers with few are left out.
        what: the figure, as it is shown.
    """
    logs = {worker: [math.log(one) for one in each if one > 0] for worker, each in samples.items()}
    known = {worker: each for worker, each in logs.items() if len(each) >= FEW}
    if len(known) < 2:
        return []
    found = []
    for worker, own in known.items():
        peers = [one for other, each in known.items() if other != worker for one in each]
        p_value, low, high = _welch(own, peers), math.exp(fmean(own)), math.exp(fmean(peers))
        if p_value < LEVEL / len(known) and low <= (1 - LEAST) * high:
            found.append(Laggard(worker, what, low, high, p_value))
    return found


def _welch(low: Sequence[float], high: Sequence[float]) -> float:
    # probability of means that are as far apart, this way round, if they are equal
    from scipy import stats

    parts = [(max(variance(each), RESOLUTION**2) / len(each), len(each) - 1) for each in (low, high)]
    square = sum(part for part, _ in parts)
    freedom = square**2 / sum(part**2 / degrees for part, degrees in parts)
    return float(stats.t.sf((fmean(high) - fmean(low)) / math.sqrt(square), freedom))


def accepting_less(prompts: Iterable[Mapping[str, AcceptanceStatistics]]) -> list[Laggard]:
    """The workers that accept less than their peers.

    Args:
        prompts: the counts of each prompt by worker; the prompt counts for the one that answered it.
    """
    samples: dict[str, list[float]] = {}
    for each in prompts:
        lengths = {worker: counts.acceptance_length for worker, counts in each.items()}
        answered = [(worker, length) for worker, length in lengths.items() if length is not None]
        if len(answered) == 1:
            worker, length = answered[0]
            samples.setdefault(worker, []).append(length)
    return laggards(samples, "τ")


def lagging(seen: Iterable[LiveFigures]) -> list[Laggard]:
    """The workers that were slower, or accepted less, than their peers over intervals that follow one another."""
    intervals = list(seen)
    length: dict[str, list[float]] = {}
    rate: dict[str, list[float]] = {}
    drafting = any(one.acceptance_length for now in intervals for one in (now.workers or {}).values())
    for start in range(len(intervals) % STRETCH, len(intervals), STRETCH):
        for worker, each in _by_worker(intervals[start : start + STRETCH]):
            # a prefill half generates, too, and has no verifications: it is no peer of decode halves
            counted = [one for one in each if one.acceptance_length is not None or not drafting]
            _put(length, worker, [one.acceptance_length for one in counted])
            _put(rate, worker, [one.tokens_per_second_per_user for one in counted])
    return [*laggards(length, "τ"), *laggards(rate, "tokens/s a user")]


def _by_worker(intervals: Sequence[LiveFigures]) -> Iterator[tuple[str, list[LiveFigures]]]:
    for worker in dict.fromkeys(name for now in intervals for name in now.workers or {}):
        yield worker, [now.workers[worker] for now in intervals if now.workers and worker in now.workers]


def _put(samples: dict[str, list[float]], worker: str, values: Iterable[float | None]) -> None:
    known = [value for value in values if value]
    if 2 * len(known) > STRETCH:
        samples.setdefault(worker, []).append(fmean(known))

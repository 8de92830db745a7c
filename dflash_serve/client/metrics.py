"""Readings of a running server's metrics, for any engine, and the difference of two readings.

The installed backends know their engine's metric names; the first one that recognises a page reads it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from dflash_serve.backend import backend, installed
from dflash_serve.common.http import Connection
from dflash_serve.common.prometheus import Samples, Scrape
from dflash_serve.speculation.statistics import AcceptanceStatistics

COPIES = ("tp_rank", "pp_rank", "moe_ep_rank")  # Labels of SGLang's ranks that run the same requests


@dataclass(frozen=True)
class ServerReading:
    """A server's metrics at one moment; None = not reported."""

    seconds: float  # Time of the reading by a monotonic clock
    acceptance: AcceptanceStatistics  # Counts since the server started
    engine: str | None = None  # The engine with these metrics; None = no installed backend recognises them
    generated: float | None = None  # Tokens since the server started
    running: float | None = None  # Requests in the batch
    queued: float | None = None  # Waiting requests
    kv_cache_usage: float | None = None  # Share of the K/V cache in use, 0 to 1


def read_acceptance(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> AcceptanceStatistics:
    """A server's acceptance; arguments and errors as for `read_server`.

    All counts are unknown if the server has no metrics (SGLang without --enable-metrics).
    """
    return read_server(url, api_key=api_key, timeout=timeout).acceptance


def read_server(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> ServerReading:
    """Reads acceptance, load and tokens from a server's metrics.

    Args:
        url: of the server, with or without `/v1`.
        api_key: sent as a bearer token.
        timeout: seconds.

    Raises:
        UserError: no server answers, or its metrics cannot be read.
    """
    connection = Connection(url, api_key, timeout)
    return reading_of(Scrape(connection.text, connection.base))


def reading_of(scrape: Scrape) -> ServerReading:
    """The reading of a scrape, by the first backend that recognises it."""
    for name in installed():
        facts = backend(name).facts
        acceptance = facts.read_acceptance(scrape)
        if acceptance is None:
            continue
        names, samples = facts.metrics, scrape.samples(facts.metrics.path)
        usage = [value for _, value in samples.named(names.kv_cache_usage or "")]
        return ServerReading(
            seconds=time.monotonic(),
            acceptance=acceptance,
            engine=acceptance.engine or facts.title,
            generated=samples.total(names.generated),
            running=_requests(samples, names.running),
            queued=_requests(samples, names.queued),
            kv_cache_usage=sum(usage) / len(usage) if usage else None,
        )
    return ServerReading(time.monotonic(), AcceptanceStatistics.unknown())


def _requests(samples: Samples, name: str | None) -> float | None:
    # SGLang's priority scheduling gives the requests of each priority beside the total, whose priority is empty, and
    # --enable-metrics-for-all-schedulers gives those of a data-parallel group once for each of its ranks.
    groups = dict[frozenset[tuple[str, str]], float]()
    for labels, count in samples.named(name or ""):
        if not labels.get("priority"):
            group = frozenset(label for label in labels.items() if label[0] not in COPIES)
            groups[group] = max(count, groups.get(group, 0.0))
    return sum(groups.values()) if groups else None


@dataclass(frozen=True)
class LiveFigures:
    """A server's figures between two readings; None = not reported, or nothing was counted."""

    engine: str | None
    seconds: float  # Time between the readings
    tokens_per_second: float | None
    tokens_per_second_per_user: float | None  # Divided by the requests in the batch at the second reading
    running: float | None  # Requests in the batch
    queued: float | None  # Waiting requests
    kv_cache_usage: float | None  # Share in use, 0 to 1
    acceptance_length: float | None  # τ
    tokens_per_step: float | None  # Mean over all steps, also those without speculation
    survival: list[float | None]  # Survival of slots 1, 2, ..., over the steps whose width covered them
    widths: dict[int, float] | None  # Width with the anchor -> its share of the steps; 1 = nothing was drafted
    trimmed: bool = False  # The engine verified an unknown part of each drafted block

    @classmethod
    def between(cls, before: ServerReading, now: ServerReading) -> LiveFigures:
        """The figures between two readings; a restart in between leaves counts unknown."""
        seconds, acceptance = now.seconds - before.seconds, now.acceptance.since(before.acceptance)
        rate = None
        if before.generated is not None and now.generated is not None and now.generated >= before.generated:
            rate = (now.generated - before.generated) / seconds
        steps = acceptance.steps
        return cls(
            engine=now.engine,
            seconds=seconds,
            tokens_per_second=rate,
            tokens_per_second_per_user=rate / now.running if rate and now.running else None,
            running=now.running,
            queued=now.queued,
            kv_cache_usage=now.kv_cache_usage,
            acceptance_length=acceptance.acceptance_length,
            tokens_per_step=acceptance.tokens_per_step,
            survival=acceptance.survival(),
            widths={w: n / steps for w, n in sorted((acceptance.widths or {}).items())} if steps else None,
            trimmed=acceptance.trimmed,
        )

    @property
    def mean_width(self) -> float | None:
        """Mean number of verified slots per step, with the anchor."""
        return sum(width * share for width, share in self.widths.items()) if self.widths else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean_width": self.mean_width}

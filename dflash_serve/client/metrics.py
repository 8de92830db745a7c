"""Readings of a running server's metrics, for any engine, and the difference of two readings.

The installed backends know their engine's metric names; the first one that recognises a page reads it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_serve.backend import EngineFacts, backend, installed
from dflash_serve.common.http import Connection
from dflash_serve.common.prometheus import Scrape
from dflash_serve.speculation.statistics import AcceptanceStatistics


@dataclass(frozen=True)
class ServerReading:
    """A server at one moment. What it does not say is None."""

    seconds: float
    """When, by a clock that never goes back."""
    acceptance: AcceptanceStatistics
    """Since the server started."""
    engine: str | None = None
    """Whose metrics these are; None = nobody knows them."""
    generated: float | None = None
    """Tokens since the server started."""
    running: float | None = None
    """Requests in the batch."""
    queued: float | None = None
    """Requests that wait."""
    kv_cache_usage: float | None = None
    """Share of the K/V cache in use, 0 to 1."""


def read_acceptance(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> AcceptanceStatistics:
    """Asks a server for its metrics, and every installed backend whether they are its engine's.

    Args:
        url: of the server, with or without `/v1`.
        api_key: sent as a bearer token.
        timeout: seconds.

    Returns:
        A reading; all unknown where the server has no metrics (SGLang without --enable-metrics).

    Raises:
        UserError: no server answers, or its metrics cannot be read.
    """
    return recognised(_scrape(url, api_key, timeout))


def read_server(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> ServerReading:
    """Acceptance, load and tokens at once; arguments and errors as of `read_acceptance`."""
    return reading_of(_scrape(url, api_key, timeout))


def reading_of(scrape: Scrape) -> ServerReading:
    """A look at a server's metrics, read by the first backend that knows them."""
    facts, acceptance = _recognise(scrape)
    now = time.monotonic()
    if facts is None:
        return ServerReading(now, acceptance)
    names, samples = facts.metrics, scrape.samples(facts.metrics.path)
    return ServerReading(
        seconds=now,
        acceptance=acceptance,
        engine=acceptance.engine or facts.title,
        generated=samples.total(names.generated),
        running=samples.total(names.running) if names.running else None,
        queued=samples.total(names.queued),
        kv_cache_usage=_mean([value for _, value in samples.named(names.kv_cache_usage or "")]),
    )


def recognised(scrape: Scrape) -> AcceptanceStatistics:
    """What the first backend that knows these metrics reads from them; unknown where none does."""
    return _recognise(scrape)[1]


def _recognise(scrape: Scrape) -> tuple[EngineFacts | None, AcceptanceStatistics]:
    for name in installed():
        facts = backend(name).facts
        found = facts.read_acceptance(scrape)
        if found is not None:
            return facts, found
    return None, AcceptanceStatistics.unknown()


def _mean(shares: Sequence[float]) -> float | None:
    """Over ranks."""
    return sum(shares) / len(shares) if shares else None


def _scrape(url: str, api_key: str | None, timeout: float) -> Scrape:
    connection = Connection(url, api_key, timeout)
    return Scrape(connection.text, connection.base)


@dataclass(frozen=True)
class LiveFigures:
    """A server between two readings. What it does not say, or did not happen, is None."""

    engine: str | None
    seconds: float
    """Between the readings."""
    tokens_per_second: float | None
    tokens_per_second_per_user: float | None
    """Shared out over the requests in the batch at the end."""
    running: float | None
    """Requests in the batch."""
    queued: float | None
    """Requests that wait."""
    kv_cache_usage: float | None
    """Share in use, 0 to 1."""
    acceptance_length: float | None
    """τ."""
    tokens_per_step: float | None
    """Steps without speculation counted."""
    survival: list[float | None]
    """Of slots 1, 2, ..., where the width covered them."""
    widths: dict[int, float] | None
    """Share of the steps that verified so many slots, the anchor counted; 1 = nothing was drafted."""

    @classmethod
    def between(cls, before: ServerReading, now: ServerReading) -> LiveFigures:
        """The figures of that time; a restart in between leaves counts unknown."""
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
        )

    @property
    def mean_width(self) -> float | None:
        """Slots verified a step, the anchor counted."""
        return sum(width * share for width, share in self.widths.items()) if self.widths else None

    def as_json(self) -> dict[str, Any]:
        """For scripts; widths' keys become texts."""
        return {**asdict(self), "mean_width": self.mean_width}

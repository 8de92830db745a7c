"""Readings of a running server's metrics, for any engine, and the difference of two readings.

The installed backends know their engine's metric names; the first one that recognises a page reads it. Behind a router
or a frontend each worker is read on its own: SGLang's router hands its workers' metrics on, elsewhere their addresses
are given.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from dflash_serve.adapter.counters import PREFIX, counted_once, read_pace
from dflash_serve.adapter.registry import backend, installed
from dflash_serve.common.http import Connection, RefusedError
from dflash_serve.common.prometheus import Scrape
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

ROUTER = "/engine_metrics"
"""Page of SGLang's router and of smg with all metrics of their workers; the label `worker_addr` names the worker.
sglang-router 0.3.2 writes `_` for `:` in their names, smg 1.13.0 leaves them as they are."""
LISTED = "/workers"
"""Page of a router's workers as JSON. The /metrics of vLLM's router 0.1.17 is that of one of them."""
PICKED = "x-went-into-resp-headers"
"""Header that an endpoint picker of the Gateway API inference extension (llm-d's gateway) sets in every answer. It
sends a request without a body to any of its servers: a page is that of one server, and of another the next time."""
WORKER = re.compile(r'worker_addr="([^"]*)"')
PAGES = ("/prometheus/metrics", ROUTER, "/metrics")  # An address of metrics may be that of the page


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
    workers: Mapping[str, ServerReading] | None = None  # Readings by worker; None = it has one page of its own
    pace: tuple[float, float] | None = None  # Tokens gained, and those that the width policy expected, since its start
    kv_pool: float | None = None  # Tokens that the K/V cache on the devices holds
    kv_reloaded: float | None = None  # Prompt tokens whose K/V came from host memory or further, since its start

    @classmethod
    def unknown(cls) -> ServerReading:
        """A reading of a page that no installed backend recognises."""
        return cls(time.monotonic(), AcceptanceStatistics.unknown())

    @classmethod
    def of_workers(cls, workers: Mapping[str, ServerReading]) -> ServerReading:
        """The sum of several workers' readings; the use of their K/V caches is a mean."""
        each = list(workers.values())
        usage = [one.kv_cache_usage for one in each if one.kv_cache_usage is not None]
        return cls(
            time.monotonic(),
            _total((one.acceptance, one.is_unused) for one in each),
            next((one.engine for one in each if one.engine is not None), None),
            _sum(one.generated for one in each),
            _sum(one.running for one in each),
            _sum(one.queued for one in each),
            sum(usage) / len(usage) if usage else None,
            workers,
            _sums(one.pace for one in each),
            _sum(one.kv_pool for one in each),
            _sum(one.kv_reloaded for one in each),
        )

    @property
    def is_unused(self) -> bool:
        """True if it has generated nothing: some engines have no counters before."""
        return self.engine is not None and not self.generated and self.acceptance.speculates is None

    def since(self, earlier: ServerReading) -> AcceptanceStatistics:
        """The acceptance between two readings; unknown if a worker restarted, came or went meanwhile."""
        if not self.same_workers(earlier):
            return AcceptanceStatistics.unknown(self.engine)
        if self.workers is None or earlier.workers is None:
            return self.acceptance.since(earlier.acceptance)
        pairs = [(now, earlier.workers[name]) for name, now in self.workers.items()]
        return _total((now.since(before), now.is_unused and before.is_unused) for now, before in pairs)

    def by_worker(self, earlier: ServerReading) -> dict[str, AcceptanceStatistics]:
        """The acceptance of each worker between two readings; empty if there are no workers."""
        then = earlier.workers or {}
        return {name: one.since(then[name]) for name, one in (self.workers or {}).items() if name in then}

    def same_workers(self, other: ServerReading) -> bool:
        """True if both readings are of the same workers."""
        return (self.workers or {}).keys() == (other.workers or {}).keys()


def _total(each: Iterable[tuple[AcceptanceStatistics, bool]]) -> AcceptanceStatistics:
    # of all workers; unused ones, whose counts may be unknown, add nothing
    known = list(each)
    return total([acceptance for acceptance, unused in known if not unused] or [acceptance for acceptance, _ in known])


def _sum(each: Iterable[float | None]) -> float | None:
    known = [one for one in each if one is not None]
    return sum(known) if known else None


def _sums(each: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [one for one in each if one is not None]
    return (sum(gained for gained, _ in known), sum(expected for _, expected in known)) if known else None


@dataclass(frozen=True)
class MetricsSource:
    """The metrics of a server, or of the workers behind it.

    Args:
        url: of the server, with or without `/v1`.
        urls: addresses of the workers' metrics, with or without the page's path; none = the server's own page, or that
            of SGLang's router.
        api_key: sent as a bearer token.
        timeout: seconds.

    Raises:
        UserError: a URL is not an address.
    """

    url: str
    urls: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 30.0

    def __post_init__(self) -> None:
        _ = self.workers, self._own  # checks the URLs now, not at the first reading

    @cached_property
    def workers(self) -> Mapping[str, Connection]:
        """The workers whose addresses are given, by address, without the page's path."""
        bases = dict.fromkeys(_base(url) for url in self.urls)
        return {base: Connection(base, self.api_key, self.timeout) for base in bases}

    @cached_property
    def _own(self) -> Connection:
        return Connection(self.url, self.api_key, self.timeout)

    def read(self) -> ServerReading:
        """Reads acceptance, load and tokens.

        Raises:
            UserError: no server answers, or its metrics cannot be read.
        """
        if self.workers:
            return ServerReading.of_workers({base: _read(worker) for base, worker in self.workers.items()})
        found = _read(self._own)
        shown_alone = found.engine is not None and found.workers is None and (len(self._listed) > 1 or self._is_picked)
        return ServerReading.unknown() if shown_alone else found

    @cached_property
    def _listed(self) -> tuple[str, ...]:
        # addresses of a router's workers; one with several data-parallel ranks is listed as address@rank
        with suppress(RefusedError, ValueError, AttributeError, KeyError, TypeError):
            listed = json.loads(self._own.text(LISTED) or "{}").get("workers")
            return tuple(dict.fromkeys(str(one["url"]).split("@")[0] for one in listed or ()))
        return ()

    @cached_property
    def _is_picked(self) -> bool:
        with suppress(RefusedError):
            return self._own.has_header("/v1/models", PICKED)  # TensorRT-LLM empties /metrics when it is read
        return False

    @property
    def shows_none(self) -> bool:
        """True if no addresses of workers are given, and the server itself shows no metrics of a known engine.

        Raises:
            UserError: as for `read`.
        """
        return not self.workers and self.read().engine is None

    def require(self, option: str = "--metrics-url") -> ServerReading:
        """Reads the metrics of a server that must have them.

        Args:
            option: the option of the command line that takes the addresses of workers' metrics.

        Raises:
            UserError: as for `read`, or no metrics of a known engine are found.
        """
        found = self.read()
        missing = [name for name, one in (found.workers or {self.url: found}).items() if one.engine is None]
        if missing and not self.workers and len(self._listed) > 1:
            do = f"give {' '.join(f'{option} {url}' for url in self._listed)}"
            raise UserError(
                f"it does not show the metrics of all its {len(self._listed)} workers", where=self.url, do=do
            )
        if missing and not self.workers and self._is_picked:
            what = "it is a gateway that picks one of its servers for each request, and so for each page of metrics"
            raise UserError(what, where=self.url, do=f"give {option} for each of its servers")
        if missing:
            do = "start it with its metrics (SGLang: --enable-metrics); behind a router or a frontend, give "
            do += f"{option} for each worker (Dynamo: http://worker:DYN_SYSTEM_PORT)"
            raise UserError("it shows no metrics of an engine that is known here", where=missing[0], do=do)
        return found


def _read(server: Connection) -> ServerReading:
    # by the server's own page, or by that of SGLang's router
    scrape = Scrape(server.text, server.base)
    found = reading_of(scrape)
    if found.engine is not None:
        return found
    try:
        workers = _worker_pages(scrape.text(ROUTER))
    except RefusedError as error:
        if error.status < 500:
            raise
        return found  # it cannot read its workers: with --dp-aware it never can
    return ServerReading.of_workers(workers) if workers else found


def _base(url: str) -> str:
    url = url.rstrip("/")
    return next((url.removesuffix(page) for page in PAGES if url.endswith(page)), url)


def _worker_pages(page: str) -> dict[str, ServerReading]:
    # the workers in a page of SGLang's router, each read with its metrics by their engine's own names
    names = [PREFIX, *(backend(name).facts.metrics.generated for name in installed())]
    prefixes = sorted({name.split(":")[0] for name in names if ":" in name}, key=len, reverse=True)
    spelt = re.compile(f"({'|'.join(prefixes)})([:_])")
    lines = defaultdict[str, list[str]](list)
    for line in page.splitlines():
        if (worker := WORKER.search(line)) and not line.startswith("#"):
            own = spelt.match(line)
            lines[worker[1]].append(f"{own[1]}:{line[own.end() :]}" if own else line)
    pages = {worker: "".join(f"{line}\n" for line in each) for worker, each in lines.items()}
    return {worker: reading_of(Scrape({"/metrics": page}.get)) for worker, page in pages.items()}


def read_acceptance(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> AcceptanceStatistics:
    """A server's acceptance; arguments and errors as for `read_server`.

    All counts are unknown if the server has no metrics (SGLang without --enable-metrics).
    """
    return read_server(url, api_key=api_key, timeout=timeout).acceptance


def read_server(url: str, *, api_key: str | None = None, timeout: float = 30.0) -> ServerReading:
    """Reads acceptance, load and tokens of a server once; arguments and errors as for `MetricsSource`."""
    return MetricsSource(url, api_key=api_key, timeout=timeout).read()


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
            running=counted_once(samples, names.running),
            queued=counted_once(samples, names.queued),
            kv_cache_usage=sum(usage) / len(usage) if usage else None,
            pace=read_pace(samples),
            kv_pool=facts.kv_pool(samples),
            kv_reloaded=facts.kv_reloaded(samples),
        )
    return ServerReading.unknown()


def _counts_on(before: ServerReading, now: ServerReading) -> bool:
    """False if a server or one of its workers began to count anew between the readings, or is another one."""
    then = before.workers or {}
    pairs = [(before, now), *((then[name], one) for name, one in (now.workers or {}).items() if name in then)]
    counts = (zip(_totals(first), _totals(last), strict=True) for first, last in pairs)
    grown = (first is None or last is None or first <= last for pair in counts for first, last in pair)
    return now.same_workers(before) and all(grown)


def _totals(reading: ServerReading) -> tuple[float | None, ...]:
    return (reading.generated, *(reading.pace or (None, None)))


def _headroom(before: ServerReading, now: ServerReading) -> float | None:
    if before.pace is None or now.pace is None:
        return None
    gained, expected = (last - first for first, last in zip(before.pace, now.pace, strict=True))
    return gained / expected if expected > 0 else None


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
    workers: dict[str, LiveFigures] | None = None  # By address; None = it has one page of its own
    headroom: float | None = None  # Tokens gained by those that the width policy expected in the same time

    @classmethod
    def between(cls, before: ServerReading, now: ServerReading) -> LiveFigures:
        """The figures between two readings; a restart in between leaves counts unknown."""
        seconds, acceptance = now.seconds - before.seconds, now.since(before)
        rate, first, last = None, before.generated, now.generated
        counts_on = _counts_on(before, now)
        if counts_on and first is not None and last is not None:
            rate = (last - first) / seconds
        steps, then = acceptance.steps, before.workers or {}
        each = {name: cls.between(then[name], one) for name, one in (now.workers or {}).items() if name in then}
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
            workers=each or None,
            headroom=_headroom(before, now) if counts_on else None,
        )

    @classmethod
    def of_answer(cls, acceptance: AcceptanceStatistics, tokens: int | None, seconds: float) -> LiveFigures:
        """The figures that the usage of one answer tells; the server's load is unknown."""
        return cls(
            engine="own requests",
            seconds=seconds,
            tokens_per_second=None,
            tokens_per_second_per_user=(tokens or 0) / seconds,
            running=None,
            queued=None,
            kv_cache_usage=None,
            acceptance_length=acceptance.acceptance_length,
            tokens_per_step=None,
            survival=[],
            widths=None,
        )

    @property
    def mean_width(self) -> float | None:
        """Mean number of verified slots per step, with the anchor."""
        return sum(width * share for width, share in self.widths.items()) if self.widths else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean_width": self.mean_width}

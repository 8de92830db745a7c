"""Facts about an engine: paths, metric names, releases."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from dflash_serve.common.extras import import_problem
from dflash_serve.common.prometheus import Samples, Scrape
from dflash_serve.errors import Problem
from dflash_serve.speculation.statistics import AcceptanceStatistics

Line = tuple[str, str]  # A line of a graph: its name (Grafana's legend form), and its PromQL


@dataclass(frozen=True)
class Probes:
    """Paths that an engine's own server answers."""

    started: str  # Says yes once all is loaded
    live: str  # Shallow: says no only when a new process would help
    ready: str  # Deep: new requests are taken and answered


@dataclass(frozen=True)
class MetricNames:
    """Names of an engine's Prometheus metrics; None = it does not report it."""

    path: str  # Page of the engine's own server
    queued: str  # Gauge: requests that wait
    running: str | None  # Gauge: requests in the batch
    kv_cache_usage: str | None  # Gauge from 0 to 1
    acceptance_length: str | None
    """Gauge, the bonus token counted; what Dynamo's planner calls tokens per decode forward."""
    generated: str  # Counter: tokens generated
    time_to_first_token: str  # Histogram, without `_bucket`, like the next three: seconds
    inter_token_latency: str
    queue_time: str
    request_latency: str


@dataclass(frozen=True)
class SpeculationLines:
    """Speculation in an engine's metrics, as lines of the dashboard; None = not reported."""

    acceptance_length: Line
    survival: Line | None = None
    widths: Line | None = None
    headroom: Line | None = None


@dataclass(frozen=True)
class Refusal:
    """Values of a key of a Deployment that an engine does not honour; `{value}` in its texts is the one given."""

    key: str  # `parallel.context`
    what: str
    do: str
    values: Collection[object] = ()  # () = all but the default
    drafting: bool = False  # Only where a drafter is loaded
    given: bool = False  # The default is refused, too, where it is given


@dataclass(frozen=True)
class EngineFacts:
    """Paths, metric names and metric readers of an engine."""

    title: str  # Name in messages and reports: `SGLang`
    engine_type: str  # Value of the label `llm-d.ai/engine-type`, by which an endpoint picker finds the metric names
    probes: Probes
    metrics: MetricNames
    speculation: SpeculationLines
    read_acceptance: Callable[[Scrape], AcceptanceStatistics | None]
    """Reads speculation from a server's metrics; None = they are not this engine's."""
    kv_pool: Callable[[Samples], float | None] = lambda samples: None
    """Tokens that the K/V cache on its devices holds; None = its metrics do not tell."""
    kv_reloaded: Callable[[Samples], float | None] = lambda samples: None
    """Prompt tokens whose K/V came from host memory or further since the start; None = its metrics do not tell."""
    earlier: SpeculationLines | None = None
    """Speculation by the names of release 0.2, which servers have beside today's until 0.4."""
    errors: Line | None = None  # Requests that failed, a second, as a line of the dashboard
    refused: Line | None = None
    """Requests that a full or unready server turned away (429, 503), a second; None = among the errors."""
    needs_gpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)  # Variables that its container must have
    prefill_annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations of the pods of a prefill server (`role: prefill`), for routers."""
    server_flags: Sequence[str] = ()
    """Options of `serve` that this engine's own server honours, not every one: `api-key-file`, `drain-seconds` (then it
    ends its answers itself after SIGTERM)."""
    refusals: Sequence[Refusal] = ()
    """Keys of a Deployment that it does not honour; all others it does (docs/deployment.md prints the table)."""
    drafting_arguments: Collection[str] = ()
    """Arguments, with underscores, that make the engine draft without a drafter of ours."""
    data_parallel: bool = False
    """One server runs several copies of the model (`parallel.data`); otherwise replicas are deployed."""
    no_swap: str | None = None
    """Reason why a running server cannot be given another drafter (`dflash-serve swap`); None = it can."""


@dataclass(frozen=True)
class Releases:
    """Releases of an engine that were read and run, by as many numbers of a version as `oldest` and `newest` have."""

    package: str
    title: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    module: str  # Part of the engine that has its arguments, and imports its kernels

    def __str__(self) -> str:
        first, last = (".".join(map(str, numbers)) for numbers in (self.oldest, self.newest))
        return first if first == last else f"{first}-{last}"

    def installed(self) -> str | None:
        """The version in this environment; None where there is none (the deployment is for another machine)."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def numbers(self, text: str | None) -> tuple[int, ...] | None:
        """The first numbers of a version; None where it is no version."""
        found = re.match(r"\.".join([r"(\d+)"] * len(self.newest)), text or "")
        return tuple(map(int, found.groups())) if found else None

    def supports(self, text: str | None) -> bool:
        """A version is one of these releases."""
        found = self.numbers(text)
        return found is not None and self.oldest <= found <= self.newest

    def problems(self, text: str | None) -> Iterator[Problem]:
        """A version that was not tested, or cannot be imported; nothing where none is installed."""
        if text is not None and not self.supports(text):
            do = f"pip install '{self.package}=={'.'.join(map(str, self.newest))}.*'"
            yield Problem(f"{self.title} {text} is not supported, tested {self}", self.package, do)
        elif fault := self.import_problem():
            yield fault

    def import_problem(self) -> Problem | None:
        """The problem of an installed release that cannot be imported here."""
        text = self.installed()
        return None if text is None else import_problem(f"{self.title} {text}", self.module)

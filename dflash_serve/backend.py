"""What a backend answers about a Deployment and about its engine, and how backends are found: by entry point.

Every backend has a name, checks and facts. One whose engine runs as its own server is a `ServerBackend`; one whose
engine runs in this process is an `InProcessBackend`; the embedded backend is both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from dflash_serve.checkpoint.config import Heads
from dflash_serve.common.extras import absent
from dflash_serve.common.prometheus import Scrape
from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem, UserError, did_you_mean
from dflash_serve.outputs import Chunk, RequestOutput
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

GROUP = "dflash_serve.backends"
EMBEDDED = "torch"
"""The backend that runs in this process."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or chat messages for the target's own template."""


class Stream(Protocol):
    """The chunks of a few prompts as steps end, and their outputs. Closing it ends its requests, no others."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def __next__(self) -> Chunk: ...

    def outputs(self) -> list[RequestOutput]:
        """The requests that have finished so far, in the order of the prompts."""
        ...

    def close(self) -> None:
        """Ends what still runs of it."""
        ...


class Engine(Protocol):
    """A running engine in this process. Any number of streams may be open side by side."""

    tokenizer: Any
    """The target's tokenizer (transformers)."""

    @property
    def dtype(self) -> str:
        """What it computes in: `float32` or `bfloat16`."""
        ...

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        ...

    @property
    def block_size(self) -> int | None:
        """B, the anchor counted; None = no speculation."""
        ...

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the target's own template.

        Raises:
            UserError: messages for a target without a template, or ones that it refuses.
        """
        ...

    def stream(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Stream:
        """Starts the prompts; each ends with a chunk that has a finish_reason.

        Raises:
            UserError: a prompt that does not fit; nothing has run then.
        """
        ...

    def plain(self) -> Engine:
        """The same target without speculation, to compare with."""
        ...

    def fixed(self, width: int, fault: str | None = None) -> Engine:
        """The same target and drafter, every step verifying `width` slots; no prefix is reused.

        Args:
            fault: a name from `controls`: the drafter is fed wrongly on purpose. Answers stay the same, drafts do not.
        """
        ...

    @property
    def controls(self) -> Sequence[str]:
        """Faults that every acceptance figure is to be held against: one that survives them is no proof."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One engine's adapter."""

    name: str
    facts: EngineFacts

    def check(self, deployment: Deployment) -> list[Problem]:
        """Everything that would not work, before anything is started.

        Raises:
            UserError: target or drafter cannot be found or read at all.
        """
        ...


@dataclass(frozen=True)
class Command:
    """What `serve` replaces itself with."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Set on top of the environment."""


@runtime_checkable
class ServerBackend(Backend, Protocol):
    """An engine that runs as its own server: nothing of ours stands between it and its clients."""

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        """Writes what the engine reads into `folder`.

        Raises:
            UserError: the deployment has problems, or a checkpoint cannot be read.
        """
        ...

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """The engine's command line, for a folder that `prepare` has written."""
        ...


@runtime_checkable
class DraftingBackend(Backend, Protocol):
    """One that says of any drafter, by its heads alone, whether it serves it."""

    releases: str
    """Of its engine, that what it says holds for."""
    untried: Collection[str]
    """Families of drafters that it serves by what was read of its engine, not run: `auto` takes others first."""

    def head_problems(self, heads: Heads) -> list[Problem]:
        """Why it does not serve such a drafter; none = it does."""
        ...


@runtime_checkable
class ContractedBackend(Backend, Protocol):
    """One whose plug-in relies on more of its engine than the engine promises."""

    def contract(self) -> Iterable[str]:
        """Lines that say what that is, and which of it holds in the installed release."""
        ...


@runtime_checkable
class InProcessBackend(Backend, Protocol):
    """An engine that runs in this process."""

    def engine(self, deployment: Deployment) -> Engine:
        """Starts it.

        Raises:
            UserError: the deployment has problems.
        """
        ...


Line = tuple[str, str]
"""Of a graph: what it is called (Grafana's legend form), and its PromQL."""


@dataclass(frozen=True)
class Probes:
    """Paths that an engine's own server answers."""

    started: str
    """Everything is loaded."""
    live: str
    """Shallow: says no only when a new process would help."""
    ready: str
    """Deep: new requests are taken and answered."""


@dataclass(frozen=True)
class MetricNames:
    """What an engine's Prometheus metrics are called; None = it does not report it."""

    path: str
    """Page of the engine's own server."""
    queued: str
    """Gauge: requests that wait."""
    running: str | None
    """Gauge: requests in the batch."""
    kv_cache_usage: str | None
    """Gauge from 0 to 1."""
    acceptance_length: str | None
    """Gauge, the bonus token counted; what Dynamo's planner calls tokens per decode forward."""
    generated: str
    """Counter: tokens generated."""
    time_to_first_token: str
    """Histogram, without `_bucket`, like the next three: seconds."""
    inter_token_latency: str
    queue_time: str
    request_latency: str


@dataclass(frozen=True)
class SpeculationLines:
    """How an engine's metrics show speculation, as lines of the dashboard; None = it cannot."""

    acceptance_length: Line
    survival: Line | None = None
    widths: Line | None = None


@dataclass(frozen=True)
class EngineFacts:
    """What an engine calls its own things: the one home of its paths, metric names and readers."""

    title: str
    """As people write it: `SGLang`."""
    engine_type: str
    """Value of the label `llm-d.ai/engine-type`, by which an endpoint picker finds the metric names."""
    probes: Probes
    metrics: MetricNames
    speculation: SpeculationLines
    read_acceptance: Callable[[Scrape], AcceptanceStatistics | None]
    """What the metrics of a server say of its speculation; None = they are not this engine's."""
    errors: Line | None = None
    """Requests that failed, a second, as a line of the dashboard."""
    refused: Line | None = None
    """Requests that a full or unready server turned away (429, 503), a second; None = among the errors."""
    needs_gpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its container must have set."""
    prefill_annotations: Mapping[str, str] = field(default_factory=dict)
    """Of the pods of a prefill server (`role: prefill`): what a router reads there."""
    server_flags: Sequence[str] = ()
    """Options of `serve` that this engine's own server honours, not every one: `api-key-file`, `drain-seconds` (then it
    ends its answers itself after SIGTERM)."""
    data_parallel: bool = False
    """Whether one server runs several copies of the model (`parallel.data`); otherwise replicas are deployed."""


def installed() -> list[str]:
    """Names of the installed backends, sorted."""
    return sorted(point.name for point in entry_points(group=GROUP))


def backend(name: str) -> Backend:
    """The installed backend of that name.

    Raises:
        UserError: there is none, or what it needs is not installed.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        do = did_you_mean(name, found) or f"installed are: {', '.join(sorted(found)) or 'none'}"
        raise UserError(f"no backend {name!r}", where="--backend", do=do)
    try:
        loaded: Backend = found[name].load()
    except ModuleNotFoundError as error:
        raise absent(error, name) or error from None
    return loaded


def server_backend(name: str) -> ServerBackend:
    """The installed backend of that name, whose server we start.

    Raises:
        UserError: there is none, or only its engine's metrics are known.
    """
    found = backend(name)
    if not isinstance(found, ServerBackend):
        what = "dflash-serve does not start it yet: it only reads the metrics of a server that runs"
        raise UserError(what, where=f"--backend {name}", do=f"use another, such as --backend {EMBEDDED}")
    return found


def embedded_backend() -> InProcessBackend:
    """The backend that runs in this process.

    Raises:
        UserError: it is not installed.
    """
    return cast(InProcessBackend, backend(EMBEDDED))

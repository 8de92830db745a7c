"""Engines and their answers, protocols of backends, facts about engines, and the registry of installed backends.

Every backend is found by its entry point, and has a name, checks and facts. One whose engine runs as its own server is
a `ServerBackend`; one whose engine runs in this process is an `InProcessBackend`; the embedded backend is both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from dflash_serve.catalogue import AUTO, best_drafter, drafters_of, unknown_target
from dflash_serve.checkpoint.config import Heads
from dflash_serve.common.extras import absent, import_problem
from dflash_serve.common.prometheus import Scrape
from dflash_serve.deployment import BACKEND_GROUP, Deployment, Model
from dflash_serve.errors import Problem, UserError, did_you_mean
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

EMBEDDED = "torch"  # The backend that runs in this process

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or chat messages for the target's own template."""


class Conversation(list[Mapping[str, str]]):
    """Chat messages, with variables for the target's chat template, such as `enable_thinking`."""

    def __init__(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> None:
        super().__init__(messages)
        self.variables = dict(variables)


def template_variables(prompt: Prompt) -> dict[str, Any]:
    """Variables that a prompt gives its target's chat template."""
    return prompt.variables if isinstance(prompt, Conversation) else {}


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log probabilities of a token from the target's raw logits, before bias, penalties, temperature and grammar."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens at its position with their log probabilities, as many as the request wants."""


@dataclass
class Chunk:
    """Text and tokens that one step brought one request."""

    index: int  # Number of its prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None before the last chunk
    logprobs: list[TokenLogprob] | None = None  # One for each of `token_ids`; None unless requested


@dataclass
class RequestOutput:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    statistics: AcceptanceStatistics = field(repr=False)  # Acceptance in its decoding steps
    logprobs: list[TokenLogprob] | None = None  # One for each of `token_ids`; None unless requested


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

    tokenizer: Any  # The target's tokenizer (transformers)

    @property
    def dtype(self) -> str:
        """Arithmetic: `float32` or `bfloat16`."""
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
        """An engine with this target and without speculation, to compare with.

        It shares memory with this one: one of them answers at a time, until its streams are read or closed.
        """
        ...

    def fixed(self, width: int, fault: str | None = None) -> Engine:
        """An engine with this target and drafter that verifies `width` slots in every step; no prefix is reused.

        It shares memory with this one, as `plain`.

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
    releases: str  # Releases of its engine that were read and run

    @property
    def untried(self) -> Collection[str]:
        """Families of drafters that were read in its engine's source and not run: `auto` takes others first."""
        ...

    def check(self, deployment: Deployment) -> list[Problem]:
        """Problems that are found before anything is started.

        Raises:
            UserError: target or drafter cannot be found or read at all.
        """
        ...

    def head_problems(self, heads: Heads) -> list[Problem]:
        """Reasons why it does not serve a drafter with such heads; none = it does."""
        ...


@dataclass(frozen=True)
class Command:
    """A command line that `serve` replaces itself with."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # Set on top of the environment


@dataclass(frozen=True)
class PreparedFile:
    """A file that `prepare` writes."""

    name: str  # Below the folder
    about: str
    text: str | None = None  # None = weights, or a secret


@dataclass(frozen=True)
class Choice:
    """A setting that the deployment leaves open, and the value that it gets."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Preview:
    """A launch, as far as it is known before it."""

    files: Sequence[PreparedFile] = ()
    choices: Sequence[Choice] = ()
    notes: Sequence[str] = ()  # Limits of this backend that no key of the deployment mentions


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

    def preview(self, deployment: Deployment, folder: Path) -> Preview:
        """Files that `prepare` would write, choices and notes; nothing is written.

        Raises:
            UserError: target or drafter cannot be found or read at all.
        """
        ...


@runtime_checkable
class LookingBackend(Protocol):
    """A backend whose servers measure the machine as they start; compared servers must use one measurement."""

    def look(self) -> Mapping[str, str]:
        """Environment with which servers need not measure again."""
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
    data_parallel: bool = False
    """One server runs several copies of the model (`parallel.data`); otherwise replicas are deployed."""


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


def installed() -> list[str]:
    """Names of the installed backends, sorted."""
    return sorted(point.name for point in entry_points(group=BACKEND_GROUP))


def backend(name: str) -> Backend:
    """The installed backend of that name.

    Raises:
        UserError: there is none, or what it needs is not installed.
    """
    found = {point.name: point for point in entry_points(group=BACKEND_GROUP)}
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
        if hasattr(found, "command"):
            missing = [one for one in ("preview", "head_problems", "releases", "untried") if not hasattr(found, one)]
            what = f"its package was written for another dflash-serve: it lacks {', '.join(missing)}"
            raise UserError(what, where=f"--backend {name}", do="install a newer release of the package")
        what = "dflash-serve does not start it yet: it only reads the metrics of a server that runs"
        raise UserError(what, where=f"--backend {name}", do=f"use another, such as --backend {EMBEDDED}")
    return found


def embedded_backend() -> InProcessBackend:
    """The backend that runs in this process.

    Raises:
        UserError: it is not installed.
    """
    return cast(InProcessBackend, backend(EMBEDDED))


def choose_drafter(deployment: Deployment, chosen: Backend) -> tuple[Deployment, str | None]:
    """The deployment with `drafter: auto` replaced by a published drafter, and a line about the choice.

    Raises:
        UserError: no published drafter of the target is known, or none that the backend serves.
    """
    if deployment.drafter is None or deployment.drafter.model != AUTO:
        return deployment, None
    target = deployment.target.model
    if not drafters_of(target):
        raise unknown_target(target)
    found = best_drafter(target, lambda heads: not chosen.head_problems(heads), chosen.untried)
    if found is None:
        do = f"`dflash-serve drafters {target}` says why; use another --backend, or name one"
        raise UserError(f"no drafter of {target} is served by this backend", where="drafter.model", do=do)
    revision = deployment.drafter.revision or found.revision
    model = Model(model=found.repository, revision=revision, quantization=deployment.drafter.quantization)
    told = f"drafter: {found.repository}" + (f" at {revision}" if revision else "")
    told += f" ({found.heads.family}, B {found.block_size}), the best known of {target} that this backend serves"
    if revision is None and "/" in found.repository:
        told += "; its revision is not pinned: set drafter.revision"
    return deployment.model_copy(update={"drafter": model}), told

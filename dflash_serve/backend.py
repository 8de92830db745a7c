"""What an engine must answer about a Deployment, and how engines are found: by entry point, never by import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.outputs import Chunk, RequestOutput
from dflash_serve.problem import Problem
from dflash_serve.speculation.params import SamplingParams

GROUP = "dflash_serve.backends"
EMBEDDED = "torch"
"""The backend that runs in this process."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or chat messages for the target's own template."""


class Engine(Protocol):
    """A running engine in this process."""

    tokenizer: Any
    """The target's tokenizer (transformers)."""

    def stream(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Chunk]:
        """News of all prompts as steps end; each ends with a chunk that has a finish_reason."""
        ...

    def outputs(self) -> list[RequestOutput]:
        """The finished requests of the last `stream`, in the order of its prompts."""
        ...

    def plain(self) -> Engine:
        """The same target without speculation, to compare with."""
        ...


class Backend(Protocol):
    """One engine's adapter."""

    name: str

    def check(self, deployment: Deployment) -> list[Problem]:
        """Everything that would not work, before anything is started."""
        ...

    def engine(self, deployment: Deployment) -> Engine:
        """Starts it in this process.

        Raises:
            UserError: the deployment has problems, or this backend runs as a server only.
        """
        ...


@dataclass(frozen=True)
class Command:
    """What `serve` replaces itself with."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Set on top of the environment."""


@dataclass(frozen=True)
class Metrics:
    """Where an engine's own server reports acceptance, and under which name."""

    path: str
    """Of the HTTP server."""
    format: str
    """`prometheus`, or `json` for a list of iterations."""
    drafted: str | None
    """Drafted tokens, without anchors."""
    accepted: str | None
    """Those of them that were accepted."""
    acceptance_length: str | None
    """Tokens gained per verification, the bonus token counted."""


class ServerBackend(Protocol):
    """An engine that runs as its own server: nothing of ours stands between it and its clients."""

    name: str
    metrics: Metrics

    def check(self, deployment: Deployment) -> list[Problem]:
        """Everything that would not work, before anything is started."""
        ...

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        """Writes what the engine reads into `folder`.

        Raises:
            UserError: the deployment has problems, or a checkpoint cannot be read.
        """
        ...

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """The engine's command line, for a folder that `prepare` has written."""
        ...


def backend(name: str) -> Backend:
    """The installed backend of that name.

    Raises:
        UserError: there is none; the message lists those there are.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        have = ", ".join(sorted(found)) or "none"
        raise UserError(f"no backend {name!r}", where="backend", do=f"installed are: {have}")
    loaded: Backend = found[name].load()
    return loaded


def server_backend(name: str) -> ServerBackend:
    """The installed backend of that name, which has a server.

    Raises:
        UserError: there is none, or it has no server.
    """
    found = backend(name)
    if not hasattr(found, "command"):
        raise UserError("it has no server", where=f"--backend {name}", do=f"use --backend {EMBEDDED}")
    return cast(ServerBackend, found)

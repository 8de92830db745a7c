"""Protocols of backends, and the values that a launch is made of.

Every backend is found by its entry point, and has a name, checks and facts. One whose engine runs as its own server is
a `ServerBackend`; one whose engine runs in this process is an `InProcessBackend`; the embedded backend is both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from dflash_serve.adapter.facts import EngineFacts
from dflash_serve.answers.engine import Engine
from dflash_serve.checkpoint.config import Heads
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem


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

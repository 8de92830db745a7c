"""Protocols of backends, and the launch of a deployment with the values that it is made of.

Every backend is found by its entry point, and has a name and facts. One whose server we start is a `ServerBackend`,
which makes a `Launch` of a deployment; one whose engine runs in this process, too, is an `InProcessBackend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from dflash_serve.adapter.facts import EngineFacts
from dflash_serve.answers.engine import Engine
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.checkpoint.target import TargetLayout
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


@dataclass(frozen=True, kw_only=True)
class Launch(ABC):
    """A deployment on its way to a server: all that `serve` shows, writes and starts, computed once."""

    deployment: Deployment

    @property
    @abstractmethod
    def problems(self) -> list[Problem]:
        """All problems that are found without starting anything."""

    @property
    def problems_here(self) -> Sequence[Problem]:
        """Problems of a start on this machine, which is not asked about where another one will serve."""
        return ()

    @property
    def problems_of_start(self) -> list[Problem]:
        """All problems of a start on this machine."""
        return [*self.problems, *self.problems_here]

    @property
    def host_bytes(self) -> int | None:
        """Host memory for K/V on one node, beside what the server itself takes; None = none, or not known."""
        return None

    @property
    def never_narrow(self) -> str | None:
        """Words after "it verifies" where `width: auto` is always the whole block; None = it follows the load."""
        return None

    @property
    def always_drafts(self) -> bool:
        """`width: auto` shortens what is verified, and leaves no draft out."""
        return False

    @property
    def measures_costs(self) -> bool:
        """The engine follows the load by costs of its own; a cost table that is given would end that."""
        return False

    @property
    def choices(self) -> Sequence[Choice]:
        """Settings that the deployment leaves open, and the values that they get."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """Limits of the engine that no key of the deployment mentions."""
        return ()

    @abstractmethod
    def files(self, folder: Path) -> Sequence[PreparedFile]:
        """Files that `prepare` would write into `folder`; nothing is written."""

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Writes into `folder` the files that the engine reads.

        Raises:
            UserError: the deployment has problems, or a checkpoint cannot be read.
        """

    @abstractmethod
    def command(self, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """The engine's command line, for a folder that `prepare` has written."""


@runtime_checkable
class ServerBackend(Backend, Protocol):
    """An engine that runs as its own server: nothing of ours stands between it and its clients."""

    def launch(self, deployment: Deployment) -> Launch:
        """The launch of a deployment, whose target and drafter are read once.

        Raises:
            UserError: target or drafter cannot be found or read at all.
        """
        ...


@runtime_checkable
class DescribedBackend(Protocol):
    """A backend that needs no models to say which widths its engine has for them."""

    def described(self, deployment: Deployment, target: TargetLayout, drafter: DrafterConfig) -> Launch:
        """The launch of models that are described, and not here; only for what it says of widths and costs."""
        ...


@runtime_checkable
class LookingBackend(Protocol):
    """A backend whose servers measure the machine as they start; compared servers must use one measurement."""

    def look(self) -> Mapping[str, str]:
        """Environment with which servers need not measure again."""
        ...


@runtime_checkable
class InProcessBackend(ServerBackend, Protocol):
    """An engine that runs in this process, too."""

    def engine(self, deployment: Deployment) -> Engine:
        """Starts it.

        Raises:
            UserError: the deployment has problems.
        """
        ...

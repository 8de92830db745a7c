"""What a backend would do with a Deployment, told before anything is done: files, choices, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from dflash_serve.backend import ServerBackend
from dflash_serve.checkpoint.source import PROVENANCE, recorded_survival
from dflash_serve.deployment import Deployment


@dataclass(frozen=True)
class PreparedFile:
    """A file that `prepare` would write."""

    name: str
    """Below the folder."""
    about: str
    text: str | None = None
    """None = weights, or a secret."""


def survival_files(drafter: Path, below: str) -> Iterator[PreparedFile]:
    """What is written beside a drafter of which training told how far its blocks are accepted."""
    if recorded_survival(drafter) is not None:
        yield PreparedFile(f"{below}/{PROVENANCE}", "how far its blocks are accepted: what `width: auto` begins with")


@dataclass(frozen=True)
class Choice:
    """What the deployment leaves open, and what becomes of it."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Preview:
    """A launch, as far as it is known before it."""

    files: Sequence[PreparedFile] = ()
    choices: Sequence[Choice] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    """What this backend does not do with the deployment though no key asks for it by name."""


@runtime_checkable
class PreviewingBackend(ServerBackend, Protocol):
    """A backend that can tell beforehand; one that cannot still shows its command and its problems."""

    def preview(self, deployment: Deployment, folder: Path) -> Preview:
        """What it would write into `folder`, and what it chooses; nothing is written.

        Raises:
            UserError: target or drafter cannot be found or read at all.
        """
        ...

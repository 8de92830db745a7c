"""What the doctor needs of an engine that it can look into; the embedded backend is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dflash_serve.proving.doctor.counts import Counts


@dataclass(frozen=True)
class Prediction:
    """What a run counts, by prompt, and the answers."""

    counts: tuple[Counts, ...]
    answers: tuple[str, ...]


class Fault(Protocol):
    """One thing wrong, as the doctor names it."""

    @property
    def cause(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def says(self) -> str: ...
    @property
    def setting(self) -> str | None: ...
    @property
    def benign(self) -> bool: ...


F = TypeVar("F", bound=Fault)


class Reference(Protocol[F]):
    """A loop of our own over the doctor's prompts."""

    def loop(self) -> Prediction:
        """The real loop, as it is."""
        ...

    def faults(self) -> Sequence[F]:
        """What may be wrong with a server."""
        ...

    def settings(self) -> Sequence[F]:
        """What may be wrong in a checkpoint's configuration."""
        ...

    def predict(self, fault: F | None) -> Prediction:
        """What the loop would count under a fault; None = under none."""
        ...

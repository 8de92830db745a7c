"""What the doctor observes and predicts, and what it needs of an engine that can be given faults. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dflash_serve.backend import Engine, InProcessBackend, Prompt
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics


@dataclass(frozen=True)
class Prediction:
    """What a run over the doctor's prompts counts, and what it answers; both by prompt."""

    counts: tuple[AcceptanceStatistics, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Observation:
    """What is known of the suspect. Its acceptance length is known at the least."""

    whole: AcceptanceStatistics
    """Of all prompts together."""
    each: tuple[AcceptanceStatistics, ...] | None = None
    """Of each prompt, the same prompts as were predicted; verifications and accepted tokens are known."""
    answers: tuple[str, ...] | None = None
    """To each prompt."""

    @classmethod
    def of_length(cls, acceptance_length: float) -> Observation:
        """One figure and nothing else."""
        return cls(AcceptanceStatistics.unknown(reported_length=acceptance_length))

    @property
    def acceptance_length(self) -> float:
        """τ."""
        length = self.whole.acceptance_length
        assert length is not None
        return length

    @property
    def has_slots(self) -> bool:
        """Whether it is known how often each slot was accepted."""
        return bool(self.whole.verifications and self.whole.accepted_by_slot)

    @property
    def kind(self) -> str:
        """`paired`, `slots` or `length`; see `statistics`."""
        if self.each is not None:
            return "paired"
        return "slots" if self.has_slots else "length"


class Fault(Protocol):
    """One thing that can be wrong with how a drafter is served."""

    @property
    def cause(self) -> str:
        """What it is about; variants of one cause are one explanation."""
        ...

    @property
    def name(self) -> str:
        """Unique among the faults of a reference."""
        ...

    @property
    def says(self) -> str:
        """How an engine or a checkpoint comes to it."""
        ...

    @property
    def setting(self) -> str | None:
        """The line of the checkpoint's configuration that would have the same effect; None where none would."""
        ...

    @property
    def benign(self) -> bool:
        """A choice of precision rather than a mistake."""
        ...


class Reference(Protocol):
    """An engine of our own over the doctor's prompts, greedily, sound or under a fault."""

    def faults(self) -> Sequence[Fault]:
        """What may be wrong with a server."""
        ...

    def settings(self) -> Sequence[Fault]:
        """What may be wrong in a checkpoint's configuration."""
        ...

    def predict(self, fault: str | None) -> Prediction:
        """What the engine would count and answer.

        Args:
            fault: the name of one of `faults` or `settings`; None = the sound engine.
        """
        ...


@runtime_checkable
class DiagnosableBackend(InProcessBackend, Protocol):
    """A backend whose engine runs in this process and can be given faults on purpose."""

    def reference(
        self, engine: Engine, drafter: str, prompts: Sequence[Prompt], params: SamplingParams, width: int
    ) -> Reference:
        """The reference that an engine of this backend makes.

        Args:
            engine: started by this backend, with a drafter.
            drafter: hub id, folder or bundled name of the same drafter; predictions read it anew.
            params: greedy, with `max_tokens`.
            width: slots verified a step.
        """
        ...

    def first_difference(self, engine: Engine, target: str, drafter: str, prompt: Prompt) -> object | None:
        """The first tensor of the engine that is not what transformers and the core compute, as a sentence by `str`.

        Args:
            engine: started by this backend, with a drafter.
            target: hub id, folder or bundled name of its target.
            drafter: likewise, of its drafter.

        Returns:
            None where nothing differs.
        """
        ...

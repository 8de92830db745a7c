"""The doctor's evidence: what a reference engine predicts, sound and under faults, and what is observed of a server.

A server's prompts go out one at a time, as messages, so that its own template applies and its counters can be read in
between; nothing else may run on it meanwhile. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from dflash_serve.backend import Engine, InProcessBackend, Prompt
from dflash_serve.client.endpoint import Endpoint, Reply
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

Steps = Mapping[int, float]
"""A prompt's steps by width, the anchor counted; 1 = nothing was drafted."""


@dataclass(frozen=True)
class Prediction:
    """What a run over the doctor's prompts counts, and what it answers; both by prompt."""

    counts: tuple[AcceptanceStatistics, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """One thing that can be wrong with how a drafter is served."""

    cause: str
    """What it is about; variants of one cause are one explanation."""
    name: str
    """Unique among the faults of a reference."""
    says: str
    """How an engine or a checkpoint comes to it."""
    setting: str | None = None
    """The line of the checkpoint's configuration that would have the same effect; None where none would."""
    benign: bool = False
    """A choice of precision rather than a mistake."""


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

    def order_errors(self) -> tuple[float, ...] | None:
        """By prompt, how far (in steps) the sound engine's counts depend on the order of a server's changing widths.

        None where they do not change.
        """
        ...


@runtime_checkable
class DiagnosableBackend(InProcessBackend, Protocol):
    """A backend whose engine runs in this process and can be given faults on purpose."""

    def reference(
        self,
        engine: Engine,
        drafter: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        width: int,
        steps: Sequence[Steps] | None = None,
    ) -> Reference:
        """The reference that an engine of this backend makes.

        Args:
            engine: started by this backend, with a drafter.
            drafter: hub id, folder or bundled name of the same drafter; predictions read it anew.
            params: greedy, with `max_tokens`.
            width: most slots verified a step.
            steps: by prompt, where a server's width changes from step to step; None = every step is `width` wide.
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


@dataclass(frozen=True)
class Observation:
    """What is known of the suspect. Its acceptance length is known at the least."""

    whole: AcceptanceStatistics
    """Counts of all prompts together."""
    each: tuple[AcceptanceStatistics, ...] | None = None
    """Counts of each prompt, the same prompts as were predicted; verifications and accepted tokens are known."""
    answers: tuple[str, ...] | None = None
    """The answer to each prompt."""
    errors: tuple[float, ...] | None = None
    """By prompt, in steps: what the predictions do not know by nature, such as the order of widths; None = nothing."""

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


@dataclass(frozen=True)
class Interview:
    """All that a server told."""

    observation: Observation
    width: int
    """Slots verified a step, at most."""
    steps: tuple[Steps, ...] | None
    """By prompt, where the width changes from step to step (`width: auto`); None = it is constant."""
    engine: str | None
    """Whose metrics these were; None = nobody knows them."""
    notes: tuple[str, ...] = ()


MIXED = (
    "the server chose its widths step by step: each prompt's predictions take the widths that it took there, in an "
    "order that is not told"
)


def interview(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    block_size: int,
    advance: Callable[[], None] = lambda: None,
) -> Interview:
    """Asks a server every prompt.

    Args:
        params: greedy.
        block_size: the drafter's B.
        advance: called after each answer.

    Raises:
        UserError: no such server, one without acceptance figures, or one that does not tell its changing widths.
    """
    answers, readings = list[Reply](), [read_acceptance(endpoint.base, api_key=endpoint.api_key)]
    for prompt in prompts:
        answers.append(endpoint.complete(prompt, params))
        readings.append(read_acceptance(endpoint.base, api_key=endpoint.api_key))
        advance()
    each = tuple(now.since(before) for before, now in pairwise(readings))
    whole = total(each)
    width, steps = widths_of(each, block_size, endpoint.base)
    if whole.acceptance_length is None:
        do = "start it with speculation and with its metrics (SGLang: --enable-metrics), or give --observed"
        raise UserError("it tells nothing of its acceptance", where=endpoint.base, do=do)
    counted = all(one.verifications and one.accepted is not None for one in each)
    observation = Observation(whole, each if counted else None, tuple(answer.text for answer in answers))
    notes = (*_others(whole, answers), *([] if steps is None else [MIXED]))
    return Interview(observation, width, steps, whole.engine, notes)


def widths_of(
    each: Sequence[AcceptanceStatistics], block_size: int, where: str
) -> tuple[int, tuple[Steps, ...] | None]:
    """The one width of all steps, or the most and how many steps of each prompt had which.

    Args:
        each: counts by prompt.

    Raises:
        UserError: the widths change and are not told, or are wider than the drafter's block.
    """
    whole = total(each)
    width, constant = _width(whole, len(each), block_size)
    told = [one.widths for one in each if one.widths]
    if width > block_size:
        do = f"name the --drafter that it serves, or its --block-size (here B = {block_size})"
        raise UserError(f"it verifies {width} slots a step, more than the drafter's block has", where=where, do=do)
    if constant:
        return width, None
    if len(told) < len(each):
        do = f"start it with a fixed width (at best {block_size}) while the doctor looks"
        raise UserError("its width changes from step to step, and it does not tell how", where=where, do=do)
    return width, tuple(told)


def _width(whole: AcceptanceStatistics, answers: int, block_size: int) -> tuple[int, bool]:
    """The usual width, and whether all steps have it but those at an answer's end, where fewer tokens are left.

    Each of those gains a token at least, so an answer has width - 1 of them at most. Where it changes: the widest.
    """
    wide = {width: steps for width, steps in (whole.widths or {}).items() if width > 1}
    if wide:
        width = max(wide)
        return width, sum(wide.values()) - wide[width] <= (width - 1) * answers and not _rests(whole, answers)
    if whole.verifications and whole.drafted:
        mean = 1 + whole.drafted / whole.verifications
        return round(mean + 0.25), mean > round(mean + 0.25) - 0.5
    return block_size, True


def _rests(whole: AcceptanceStatistics, answers: int) -> bool:
    """Whether more steps drafted nothing than the first and last of each answer may."""
    return (whole.widths or {}).get(1, 0) > 2 * answers


def _others(whole: AcceptanceStatistics, answers: Sequence[Reply]) -> list[str]:
    """A note where the server generated more than it was asked for here."""
    tokens = [answer.completion_tokens for answer in answers if answer.completion_tokens is not None]
    if whole.verifications is None or whole.accepted is None or len(tokens) != len(answers):
        return []
    asked, gained = sum(tokens), whole.verifications + whole.accepted
    if gained <= 1.2 * asked + 8 * len(answers):
        return []
    return [f"the server gained {gained:.0f} tokens while {asked} were asked for: somebody else uses it"]

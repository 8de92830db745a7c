"""The doctor's evidence: predictions of a reference engine, observations of a server, and the likelihood of one given
the other.

A server gets the prompts one at a time, as messages, so that its own template applies and its counters can be read in
between. It must serve nothing else meanwhile.

There are three kinds of evidence, best first:

* **paired**: counts of each prompt. Speculation changes no token, so the right explanation predicts each prompt's
  counts almost exactly, and a wrong one misses prompt by prompt even if its τ is right. The distance d of a prompt's
  counts (verifications, and those that accepted each slot) is Cauchy with a scale of one step: a few prompts where the
  answers parted at a near-tie cost every explanation alike. With changing widths the scale grows by the dependence of
  the sound counts on the order of the widths, which servers do not report.
* **slots**: counts by slot of other prompts, or of all together. Given that slot k - 1 was accepted, slot k is or is
  not: a beta-binomial with the prediction as its prior (plus Jeffreys' 1/2), so both samples' errors count.
* **length**: τ alone, normal with the errors of both sides.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Protocol, runtime_checkable

from dflash_serve.adapter.protocol import InProcessBackend
from dflash_serve.answers.engine import Engine, Prompt
from dflash_serve.client.endpoint import Endpoint, Reply
from dflash_serve.client.peers import accepting_less
from dflash_serve.common.progress import doing
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

ROUNDING = 0.005 / math.sqrt(3)  # Standard error of a figure given with two decimals
FEW = 5  # Trials below which a slot is not compared

Trial = tuple[float, float, float, float]
"""Trials and successes of one slot if the slot before was accepted: as observed, then as predicted."""

Steps = Mapping[int, float]  # A prompt's steps by width, the anchor counted; 1 = nothing was drafted


@dataclass(frozen=True)
class Prediction:
    """Counts and answers of a run over the doctor's prompts, by prompt."""

    counts: tuple[AcceptanceStatistics, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """One thing that can be wrong with how a drafter is served."""

    cause: str  # Its subject; variants of one cause are one explanation
    name: str  # Unique among the faults of a reference
    says: str  # Causes of this fault in an engine or a checkpoint
    setting: str | None = None
    """The line of the checkpoint's configuration that would have the same effect, if there is one."""
    benign: bool = False  # A choice of precision rather than a mistake


class Reference(Protocol):
    """An engine of our own over the doctor's prompts, greedily, sound or under a fault."""

    def faults(self) -> Sequence[Fault]:
        """Known faults of a server."""
        ...

    def settings(self) -> Sequence[Fault]:
        """Known faults of a checkpoint's configuration."""
        ...

    def predict(self, fault: str | None) -> Prediction:
        """Counts and answers under one of `faults` or `settings`, by its name; None = the sound engine."""
        ...

    def order_errors(self) -> tuple[float, ...] | None:
        """Dependence of the sound engine's counts on the order of a server's changing widths, in steps, by prompt.

        None if the widths do not change.
        """
        ...


@runtime_checkable
class DiagnosableBackend(InProcessBackend, Protocol):
    """A backend whose engine runs in this process and can be given faults on purpose."""

    def reference(
        self,
        engine: Engine,
        deployment: Deployment,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        width: int,
        steps: Sequence[Steps] | None = None,
    ) -> Reference:
        """The reference that an engine of this backend makes.

        Args:
            engine: started by this backend, with a drafter.
            deployment: the one that it was started with; predictions read its drafter anew.
            params: greedy, with `max_tokens`.
            width: most slots verified a step.
            steps: by prompt, for a server whose width changes; None = every step is `width` wide.
        """
        ...

    def first_difference(self, engine: Engine, deployment: Deployment, prompt: Prompt) -> object | None:
        """The first tensor of the engine that differs from transformers' and the core's; `str` gives a sentence.

        Args:
            engine: started by this backend, with a drafter.
            deployment: the one that it was started with.
        """
        ...


@dataclass(frozen=True)
class Observation:
    """Counts observed of a server; at least its acceptance length is known."""

    whole: AcceptanceStatistics  # Counts of all prompts together
    each: tuple[AcceptanceStatistics, ...] | None = None
    """Counts of each prompt, the same prompts as were predicted; verifications and accepted tokens are known."""
    answers: tuple[str, ...] | None = None  # The answer to each prompt
    errors: tuple[float, ...] | None = None
    """Uncertainty of the predictions by prompt, in steps, from the unknown order of widths; None = none."""

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
        return bool(self.whole.verifications and self.whole.accepted_by_slot)

    @property
    def kind(self) -> str:
        return "paired" if self.each is not None else "slots" if self.has_slots else "length"


@dataclass(frozen=True)
class Interview:
    """Answers and metrics of a server."""

    observation: Observation
    width: int  # Slots verified a step, at most
    steps: tuple[Steps, ...] | None
    """By prompt, if the width changes from step to step (`width: auto`); None = it is constant."""
    engine: str | None  # The engine that these metrics belong to; None = unknown
    notes: tuple[str, ...] = ()
    contexts: tuple[int | None, ...] = ()  # Tokens of each prompt; None = its answer does not tell


MIXED = (
    "the server chose its widths step by step: each prompt's predictions take as many steps of each width, in an "
    "assumed order, because the server does not report it"
)

BY_USAGE = (
    "the server shows no metrics: its acceptance is that of its answers' usage, which tells no slots and no widths; "
    "all steps are taken to be as wide as they are on average, or as the deployment's"
)


def interview(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    most: int,
) -> Interview:
    """Asks a server every prompt.

    Args:
        params: greedy.
        most: most slots that a step of its deployment verifies.

    Raises:
        UserError: no such server, one without acceptance figures, or one that does not report its changing widths.
    """
    by_usage = endpoint.metrics.shows_none
    # Finds how it tells tokens, and so may take several requests: one token needs no verification, which would count.
    endpoint.complete(prompts[0], params.model_copy(update={"max_tokens": 1}))
    answers, readings = list[Reply](), [endpoint.metrics.read()]
    with doing("asking the server", len(prompts)) as work:
        for prompt in prompts:
            answers.append(endpoint.complete(prompt, params))
            if not by_usage:
                readings.append(endpoint.metrics.read())
            elif answers[-1].acceptance is None:
                endpoint.metrics.require()
            work.advance()
    each = tuple(now.since(before) for before, now in pairwise(readings))
    if by_usage:
        each = tuple(answer.acceptance or AcceptanceStatistics.unknown() for answer in answers)
    behind = accepting_less(now.by_worker(before) for before, now in pairwise(readings))
    whole = total(each)
    width, steps = widths_of(each, most, endpoint.base)
    if whole.acceptance_length is None:
        do = "start it with speculation, and give --metrics-url for each worker of a router; or give --observed"
        raise UserError("it reports no acceptance", where=endpoint.base, do=do)
    counted = all(one.verifications and one.accepted is not None for one in each)
    observation = Observation(whole, each if counted else None, tuple(answer.text for answer in answers))
    told = [BY_USAGE] if by_usage else [*map(str, behind), *_others(whole, answers)]
    notes = (*told, *([] if steps is None else [MIXED]))
    return Interview(observation, width, steps, whole.engine, notes, tuple(answer.prompt_tokens for answer in answers))


def widths_of(each: Sequence[AcceptanceStatistics], most: int, where: str) -> tuple[int, tuple[Steps, ...] | None]:
    """The width of all steps; if it changes, the largest one and each prompt's steps by width.

    Args:
        each: counts by prompt.
        most: most slots that a step of the deployment verifies; the width if the server reports none.

    Raises:
        UserError: the widths change and are not reported, are wider than the deployment's, or blocks are trimmed.
    """
    whole = total(each)
    if whole.trimmed:
        what = "it trims drafted blocks, and does not report which slots it verified"
        do = f"start it with a fixed width (at best {most}) while the doctor looks"
        raise UserError(what, where=where, do=do)
    wide = {width: steps for width, steps in (whole.widths or {}).items() if width > 1}
    width, constant = most, True
    if wide:
        width = max(wide)
        # Fewer tokens are left at an answer's end. Such a step gains at least one, so an answer has width - 1 of them.
        ends = sum(wide.values()) - wide[width] <= (width - 1) * len(each)
        # The first and the last step of an answer may draft nothing; more such steps are pauses of speculation.
        constant = ends and (whole.widths or {}).get(1, 0) <= 2 * len(each)
    elif whole.verifications and whole.drafted:
        mean = 1 + whole.drafted / whole.verifications
        width = round(mean + 0.25)
        constant = mean > width - 0.5
        # Usage tells no slots, and counts the narrow steps at answers' ends: widths 1 to most - 1, once each.
        missing = (most - 1) * whole.verifications - whole.drafted
        if whole.accepted_by_slot is None and 0 <= missing <= len(each) * most * (most - 1) / 2:
            width, constant = most, True
    if width > most:
        do = "name the --drafter that it serves, its --block-size or its speculation.width"
        raise UserError(f"it verifies {width} slots a step, more than the deployment's {most}", where=where, do=do)
    if constant:
        return width, None
    told = [one.widths for one in each if one.widths]
    if len(told) < len(each):
        do = f"start it with a fixed width (at best {most}) while the doctor looks"
        raise UserError("its width changes from step to step, and it does not report its widths", where=where, do=do)
    return width, tuple(told)


def _others(whole: AcceptanceStatistics, answers: Sequence[Reply]) -> list[str]:
    # The server's counters move with other clients' requests, too.
    tokens = [answer.completion_tokens for answer in answers if answer.completion_tokens is not None]
    if whole.verifications is None or whole.accepted is None or len(tokens) != len(answers):
        return []
    asked, gained = sum(tokens), whole.verifications + whole.accepted
    if gained <= 1.2 * asked + 8 * len(answers):
        return []
    return [f"the server gained {gained:.0f} tokens while {asked} were asked for: it has other clients"]


def log_likelihood(observed: Observation, predicted: Sequence[AcceptanceStatistics]) -> float:
    """Log likelihood of the observation, up to a constant that is the same for all predictions (counts by prompt)."""
    whole = total(predicted)
    if whole.acceptance_length is None:
        return -math.inf  # it predicts no drafts at all, but some were observed
    if observed.each is not None:
        errors = observed.errors or [0.0] * len(observed.each)
        return -sum(
            math.log1p(distance(*pair) / (1 + error**2))
            for *pair, error in zip(observed.each, predicted, errors, strict=True)
        )
    if observed.has_slots:
        from scipy import stats

        trials = _trials(observed.whole, whole)
        return sum(float(stats.betabinom.logpmf(k, n, guessed + 0.5, m - guessed + 0.5)) for n, k, m, guessed in trials)
    error = _difference_error(observed, predicted)
    return -0.5 * ((observed.acceptance_length - whole.acceptance_length) / error) ** 2 - math.log(error)


def p_value(observed: Observation, predicted: Sequence[AcceptanceStatistics]) -> float:
    """Probability of a difference as large as this, in τ and (if known) in survival, if the prediction holds."""
    from scipy import stats  # backends import this module for its protocols, without the extra [prove]

    whole = total(predicted)
    if whole.acceptance_length is None:
        return 0.0
    z = (observed.acceptance_length - whole.acceptance_length) / _difference_error(observed, predicted)
    of_length = float(2 * stats.norm.sf(abs(z)))
    if not observed.has_slots:
        return of_length
    squares = [square for trial in _trials(observed.whole, whole) if (square := _square(*trial)) is not None]
    of_survival = float(stats.chi2.sf(sum(squares), len(squares))) if squares else 1.0
    return min(1.0, 2 * min(of_length, of_survival))


def length_error(each: Sequence[AcceptanceStatistics]) -> float | None:
    """Standard error of τ over prompts, by the jackknife: prompts differ far more than steps of one prompt.

    None if one prompt has all the verifications. Verifications and accepted tokens must be known.
    """
    whole, count = total(each), len(each)
    if count < 2 or any(one.verifications == whole.verifications for one in each):
        return None
    verifications, accepted = known_counts(whole)
    without = [1 + (accepted - b) / (verifications - a) for a, b in map(known_counts, each)]
    mean = sum(without) / count
    return math.sqrt((count - 1) / count * sum((length - mean) ** 2 for length in without))


def known_counts(counts: AcceptanceStatistics) -> tuple[float, float]:
    """Verifications and accepted drafted tokens of counts that have them."""
    assert counts.verifications is not None
    assert counts.accepted is not None
    return counts.verifications, counts.accepted


def distance(a: AcceptanceStatistics, b: AcceptanceStatistics) -> float:
    """Squared distance of two counts of one prompt, in steps."""
    (steps, accepted), (other_steps, other_accepted) = known_counts(a), known_counts(b)
    if a.accepted_by_slot is None or b.accepted_by_slot is None:
        return (steps - other_steps) ** 2 + (accepted - other_accepted) ** 2
    slots = zip_longest(a.accepted_by_slot, b.accepted_by_slot, fillvalue=0)
    return (steps - other_steps) ** 2 + sum((x - y) ** 2 for x, y in slots)


def _difference_error(observed: Observation, predicted: Sequence[AcceptanceStatistics]) -> float:
    # Standard error of the difference in τ; an unknown sample counts as one like ours.
    ours = length_error(predicted) or 0.1
    theirs = length_error(observed.each) if observed.each else None
    return math.sqrt(ours**2 + (ours if theirs is None else theirs) ** 2 + ROUNDING**2)


def _trials(observed: AcceptanceStatistics, predicted: AcceptanceStatistics) -> Iterator[Trial]:
    assert observed.accepted_by_slot is not None
    assert predicted.accepted_by_slot is not None
    tries, guesses = known_counts(observed)[0], known_counts(predicted)[0]
    for successes, guessed in zip_longest(observed.accepted_by_slot, predicted.accepted_by_slot, fillvalue=0):
        yield tries, successes, guesses, guessed
        tries, guesses = successes, guessed


def _square(tries: float, successes: float, guesses: float, guessed: float) -> float | None:
    # squared normal deviate of two proportions; None if there are too few trials to compare
    if min(tries, guesses) < FEW:
        return None
    share = (successes + guessed) / (tries + guesses)
    variance = share * (1 - share) * (1 / tries + 1 / guesses)
    return (successes / tries - guessed / guesses) ** 2 / variance if variance else None

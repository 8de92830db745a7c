"""Acceptance and speed over prompts: one answer timed, speculation against none in turns, and whole tasks.

`generate`, `evaluate` and `build` measure with this module alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Literal

from pydantic import Field

from dflash_serve.adapter.checks import block_size_of
from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.answers.engine import Engine, Prompt, RequestOutput, template_variables
from dflash_serve.answers.groups import Dimension, LabelledPrompt, grouped
from dflash_serve.answers.prompts import context_needed
from dflash_serve.common.progress import doing
from dflash_serve.common.provenance import Environment, environment
from dflash_serve.common.settings import Frozen
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

AT_ONCE = 16  # Requests at once by default
AS_IT_IS = "as it is"  # The drafter with its own features, in contrast to the controls


def answer_all(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, label: str = "answers"
) -> list[RequestOutput]:
    """All answers, in the order of the prompts.

    Raises:
        UserError: a prompt that does not fit; nothing has run then.
    """
    stream = engine.stream(prompts, [params] * len(prompts))
    with doing(label, len(prompts)) as work:
        for chunk in stream:
            work.advance(chunk.finish_reason is not None)
    return stream.outputs()


@dataclass(frozen=True)
class TimedRun:
    """One answer and how fast it came."""

    output: RequestOutput
    seconds: float  # Time from the first chunk to the last: decoding without the prompt
    tokens: int  # Tokens that came in that time

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was nothing to time."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def survival(self) -> list[float | None]:
        """Survival of every slot that a step has verified."""
        statistics = self.output.statistics
        return statistics.survival(max(statistics.widths or (), default=1))


@dataclass(frozen=True)
class SpeedComparison:
    """Speed with and without speculation: medians over interleaved rounds. An unknown figure is None."""

    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    ratio: float | None
    rounds: int
    same_tokens: bool


def time_run(
    engine: Engine, prompt: Prompt, params: SamplingParams, show: Callable[[str], None] | None = None
) -> TimedRun:
    """Runs one prompt, handing each piece of text to `show` as it comes."""
    first = end = 0.0
    tokens = -1
    stream = engine.stream([prompt], [params])
    for chunk in stream:
        end = perf_counter()
        if tokens < 0:
            first, tokens = end, 0
        else:
            tokens += len(chunk.token_ids)
        if show:
            show(chunk.text)
    return TimedRun(stream.outputs()[0], end - first, max(tokens, 0))


def compare_with_plain(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> SpeedComparison:
    """Each prompt with and without speculation, in turns, so that a busy machine slows both alike.

    The engine should have run before: its first run pays for more than itself. `params` should fix the seed where it
    samples: the same seed gives the same tokens with any width.
    """
    plain, pairs = engine.plain(), list[tuple[TimedRun, TimedRun]]()
    with doing("the same prompt with and without speculation, in turns", len(prompts)) as work:
        for prompt in prompts:
            pairs.append((time_run(engine, prompt, params), time_run(plain, prompt, params)))
            work.advance()

    def median_speed(runs: Sequence[TimedRun]) -> float | None:
        speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
        return median(speeds) if speeds else None

    speed, plain_speed = (median_speed(runs) for runs in zip(*pairs, strict=True))
    ratio = speed / plain_speed if speed and plain_speed else None
    same = all(run.output.token_ids == plain_run.output.token_ids for run, plain_run in pairs)
    return SpeedComparison(speed, plain_speed, ratio, len(pairs), same)


class TaskFigures(Frozen):
    """One task under one control or none, or one group of steps."""

    prompts: int
    steps: float | None  # Steps without speculation included; τ and survival are over those that speculated
    tokens: float | None
    acceptance_length: float | None
    survival: list[float | None]  # Survival of slots 1..B-1
    speed_up: float | None = None  # Tokens/s by those without speculation, one prompt at a time; None = not timed


class EvaluationReport(Frozen):
    """Figures of all tasks at one width."""

    target: str
    drafter: str
    deployment: dict[str, Any]  # The whole deployment that was measured, without defaults
    width: int | Literal["auto"]  # Slots verified in a step; auto = chosen by the engine in each step
    max_tokens: int
    temperature: float
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Thinking on or off changes acceptance by up to a factor of two."""
    dtype: str
    environment: Environment
    tasks: dict[str, dict[str, TaskFigures]]  # Task -> `AS_IT_IS` or the control's name -> figures
    by: dict[Dimension, dict[str, TaskFigures]] = Field(default={}, exclude_if=operator.not_)
    """Dimension -> group -> figures of all tasks together, with the drafter as it is."""


def evaluate(
    deployment: Deployment,
    tasks: Mapping[str, Sequence[LabelledPrompt]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    controls: bool | None = None,
    timed: int = 4,
    by: Sequence[Dimension] = (),
) -> EvaluationReport:
    """Measures a deployment in the embedded engine, task by task.

    Args:
        deployment: whole; its width counts where it is given, else the whole block.
        controls: measure with spoilt features, too; None = where the width is fixed.
        timed: how many prompts of a task to time alone, with and without speculation in turns.
        by: dimensions by which the steps of all tasks are grouped, too.

    Raises:
        UserError: it does not speculate, controls at `width: auto`, or the embedded engine refuses it.
    """
    deployment = measurable(deployment)
    width = deployment.speculation.width
    if width == "auto" and controls:
        raise UserError("controls need a fixed width", where="--controls", do="give --width a number, or leave it out")
    if deployment.limits.max_model_len is None:
        every = [one.prompt for prompts in tasks.values() for one in prompts]
        room = context_needed(deployment.target, every, max_tokens)
        limits = deployment.limits.model_copy(update={"max_model_len": room})
        deployment = deployment.model_copy(update={"limits": limits})
    engine = embedded_backend().engine(deployment)
    assert deployment.drafter is not None and width != "off"  # noqa: PT018
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    evaluation = _Evaluation(engine, width, params)
    found = {name: evaluation.task(name, prompts, controls is not False, timed) for name, prompts in tasks.items()}
    return EvaluationReport(
        target=deployment.target.model,
        drafter=deployment.drafter.model,
        deployment=deployment.model_dump(mode="json", exclude_defaults=True),
        width=width,
        max_tokens=max_tokens,
        temperature=temperature,
        chat_template_kwargs=template_variables(next(iter(tasks.values()))[0].prompt),
        dtype=engine.dtype,
        environment=environment(),
        tasks=found,
        by={dimension: evaluation.groups(dimension) for dimension in by},
    )


def measurable(deployment: Deployment) -> Deployment:
    """The deployment with a width, the whole block by default, and a batch size.

    Raises:
        UserError: nothing is drafted.
    """
    speculation, limits = deployment.speculation, deployment.limits
    if deployment.drafter is None:
        raise UserError("there is no drafter", where="evaluate", do="give --drafter")
    if "width" not in speculation.model_fields_set:
        speculation = speculation.model_copy(update={"width": block_size_of(deployment)})
    if speculation.width in ("off", 1):
        raise UserError("without speculation nothing is accepted", where="--width", do="give 2 or more, or auto")
    if limits.max_batch_size is None:
        limits = limits.model_copy(update={"max_batch_size": AT_ONCE})
    return deployment.model_copy(update={"speculation": speculation, "limits": limits})


@dataclass(frozen=True)
class _Evaluation:
    """Measures tasks with one engine at one width, all with the same sampling."""

    engine: Engine
    width: int | Literal["auto"]
    params: SamplingParams
    answered: list[tuple[LabelledPrompt, RequestOutput]] = field(default_factory=list)  # by the drafter as it is

    def task(self, name: str, asked: Sequence[LabelledPrompt], controls: bool, timed: int) -> dict[str, TaskFigures]:
        """Measures a task as it is and under the controls; the first `timed` prompts are timed, too.

        Controls run at a fixed width only: with a spoilt drafter `auto` would hardly speculate.
        """
        engine = self.engine if self.width == "auto" else self.engine.fixed(self.width)
        prompts = [one.prompt for one in asked]
        outputs = answer_all(engine, prompts, self.params, name)
        self.answered.extend(zip(asked, outputs, strict=True))
        sound = self._figures([one.statistics for one in outputs])
        if timed:
            time_run(self.engine, prompts[0], self.params)  # warm-up
            ratio = compare_with_plain(self.engine, prompts[:timed], self.params).ratio
            sound = sound.model_copy(update={"speed_up": ratio})
        rows = {AS_IT_IS: sound}
        if self.width != "auto" and controls:
            for control in self.engine.controls:
                spoilt = self.engine.fixed(self.width, fault=control)
                answers = answer_all(spoilt, prompts, self.params, f"{name}, {control}")
                rows[control] = self._figures([one.statistics for one in answers])
        return rows

    def groups(self, by: Dimension) -> dict[str, TaskFigures]:
        """Figures of all answers so far, by group."""
        prompts, outputs = [one for one, _ in self.answered], [output for _, output in self.answered]
        return {group: self._figures([*counts.values()]) for group, counts in grouped(prompts, outputs, by).items()}

    def _figures(self, counts: Sequence[AcceptanceStatistics]) -> TaskFigures:
        whole = total(counts)
        return TaskFigures(
            prompts=len(counts),
            steps=whole.steps,
            tokens=whole.tokens,
            acceptance_length=whole.acceptance_length,
            survival=whole.survival(self.engine.block_size if self.width == "auto" else self.width),
        )

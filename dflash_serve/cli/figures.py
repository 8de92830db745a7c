"""Figures that verbs share: how fast prompts are answered with and without speculation, and how a figure is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from dflash_serve.backend import Engine, Prompt
from dflash_serve.outputs import RequestOutput
from dflash_serve.speculation.params import SamplingParams

ROUNDS = 3  # Answers of each prompt with speculation and without, in a comparison


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
    plain = engine.plain()
    pairs = [(time_run(engine, prompt, params), time_run(plain, prompt, params)) for prompt in prompts]
    speed, plain_speed = (_median_speed(runs) for runs in zip(*pairs, strict=True))
    ratio = speed / plain_speed if speed and plain_speed else None
    same = all(run.output.token_ids == plain_run.output.token_ids for run, plain_run in pairs)
    return SpeedComparison(speed, plain_speed, ratio, len(pairs), same)


def _median_speed(runs: Iterable[TimedRun]) -> float | None:
    speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    return median(speeds) if speeds else None


def number(value: float | None, digits: int) -> str:
    """The figure as it is printed; one that is not known is `unknown`."""
    return "unknown" if value is None else f"{value:.{digits}f}"


def survival_text(survival: Iterable[float | None]) -> str:
    """Survival slot by slot, as it is printed; `?` = not known."""
    return " ".join("?" if value is None else f"{value:.2f}" for value in survival) or "unknown"

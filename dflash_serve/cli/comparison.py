"""One prompt with and without speculation, in turns, so that a busy machine slows both alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from dflash_serve.backend import Engine, Prompt
from dflash_serve.outputs import RequestOutput
from dflash_serve.speculation.params import SamplingParams

ROUNDS = 3


@dataclass(frozen=True)
class TimedRun:
    """One answer and how fast it came."""

    output: RequestOutput
    seconds: float
    """From the first chunk to the last: decoding without the prompt."""
    tokens: int
    """Tokens that came in that time."""

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was nothing to time."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


@dataclass(frozen=True)
class Comparison:
    """What speculation was worth: medians over interleaved rounds. A figure that is not known is None."""

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


def compare_with_plain(engine: Engine, prompt: Prompt, params: SamplingParams, first: TimedRun) -> Comparison:
    """The prompt with and without speculation in turns; `first` is the first run with it.

    `params` should fix the seed where it samples: the same seed gives the same tokens with any width.
    """
    plain = engine.plain()
    runs, plain_runs = [first], [time_run(plain, prompt, params)]
    for _ in range(ROUNDS - 1):
        runs.append(time_run(engine, prompt, params))
        plain_runs.append(time_run(plain, prompt, params))
    speed, plain_speed = _median_speed(runs), _median_speed(plain_runs)
    same = all(run.output.token_ids == first.output.token_ids for run in plain_runs)
    return Comparison(speed, plain_speed, _ratio(speed, plain_speed), ROUNDS, same)


def speed_up(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> float | None:
    """Tokens/s with speculation by those without, each a median over the prompts, one stream, in turns."""
    plain, runs, plain_runs = engine.plain(), list[TimedRun](), list[TimedRun]()
    time_run(engine, prompts[0], params)  # the first run of an engine pays for more than itself
    for prompt in prompts:
        runs.append(time_run(engine, prompt, params))
        plain_runs.append(time_run(plain, prompt, params))
    return _ratio(_median_speed(runs), _median_speed(plain_runs))


def _median_speed(runs: list[TimedRun]) -> float | None:
    speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    return median(speeds) if speeds else None


def _ratio(speed: float | None, plain_speed: float | None) -> float | None:
    return speed / plain_speed if speed and plain_speed else None

"""`dflash-serve generate`: streams one answer, and measures it with and without speculation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from dflash_serve.backend import Engine, Prompt, RequestOutput, embedded_backend
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair, number, survival_text
from dflash_serve.common.extras import need
from dflash_serve.common.settings import describe
from dflash_serve.errors import UserError
from dflash_serve.llm import LLM
from dflash_serve.speculation.params import SamplingParams

Compare = Annotated[bool, typer.Option("--compare", help="Measure the same prompt without speculation, side by side.")]
ROUNDS = 3  # Answers with speculation and without, in a comparison


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    deployment: options.DeploymentOption = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    block_size: options.BlockSize = None,
    width: options.Width = None,
    dtype: options.Dtype = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    raw: options.Raw = False,
    compare: Compare = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Stream an answer, then print acceptance length, survival and speed."""
    need("torch", "safetensors", "torch", "transformers")
    console = Console(stderr=as_json, highlight=False)
    try:
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    except ValidationError as error:
        raise UserError(describe(error)) from None
    flags = options.deployment_flags({**context.params, "max_batch_size": 1})
    described = described_pair(deployment, flags, embedded_backend(), quiet=quiet)
    with console.status(f"loading {described.target.model} (the first time it is converted and measured)"):
        llm = LLM(described)
    asked: Prompt = prompt if raw else [{"role": "user", "content": prompt}]

    def show(text: str) -> None:
        console.print(text, end="", markup=False, soft_wrap=True)

    run = time_run(llm.engine, asked, params, None if as_json else show)
    comparison = None
    if compare:
        with console.status("the same prompt with and without speculation, in turns"):
            comparison = compare_with_plain(llm.engine, [asked] * ROUNDS, params)
    if as_json:
        typer.echo(json.dumps(_report(run, comparison), indent=2))
    else:
        show("\n\n")
        for line in () if quiet else _summary(described.speculation.width, run, comparison):
            console.print(line, soft_wrap=True)
    if comparison is not None and not comparison.same_tokens and temperature == 0:
        console.print("[yellow]The two answers differ: in bfloat16 a near-tie may, in float32 it is a fault.")
        raise typer.Exit(1)


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
    plain = engine.plain()
    pairs = [(time_run(engine, prompt, params), time_run(plain, prompt, params)) for prompt in prompts]

    def median_speed(runs: Sequence[TimedRun]) -> float | None:
        speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
        return median(speeds) if speeds else None

    speed, plain_speed = (median_speed(runs) for runs in zip(*pairs, strict=True))
    ratio = speed / plain_speed if speed and plain_speed else None
    same = all(run.output.token_ids == plain_run.output.token_ids for run, plain_run in pairs)
    return SpeedComparison(speed, plain_speed, ratio, len(pairs), same)


def _report(run: TimedRun, comparison: SpeedComparison | None) -> dict[str, Any]:
    output = run.output
    report = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "tokens": len(output.token_ids),
        "tokens_per_second": run.tokens_per_second,
        "acceptance_length": output.statistics.acceptance_length,
        "tokens_per_step": output.statistics.tokens_per_step,
        "survival": run.survival,
        "widths": dict(sorted((output.statistics.widths or {}).items())),
    }
    return report if comparison is None else report | {"comparison": asdict(comparison)}


def _summary(setting: int | str, run: TimedRun, comparison: SpeedComparison | None) -> Iterator[str]:
    statistics = run.output.statistics
    yield f"{len(run.output.token_ids)} tokens, {number(run.tokens_per_second, 1)} tokens/s"
    if statistics.acceptance_length is not None:
        widths = ", ".join(f"{width}: {steps}" for width, steps in sorted((statistics.widths or {}).items()))
        survival = survival_text(run.survival)
        yield f"acceptance length τ = {statistics.acceptance_length:.2f}; survival by slot {survival}"
        yield f"width ({setting}) x steps: {widths}"
    if comparison is not None:
        same = "identical tokens" if comparison.same_tokens else "DIFFERENT tokens"
        yield (
            f"without speculation {number(comparison.plain_tokens_per_second, 1)} tokens/s, "
            f"with {number(comparison.tokens_per_second, 1)}: [bold]{number(comparison.ratio, 2)}x[/bold] "
            f"(medians of {comparison.rounds} interleaved runs), {same}"
        )

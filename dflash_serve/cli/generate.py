"""`dflash-serve generate`: stream one answer, and say what speculation was worth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_serve.cli import options
from dflash_serve.cli.drafters import name_drafter
from dflash_serve.common.extras import need

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_serve.backend import Prompt
    from dflash_serve.cli.figures import SpeedComparison, TimedRun
    from dflash_serve.llm import LLM
    from dflash_serve.speculation.params import SamplingParams


Compare = Annotated[bool, typer.Option("--compare", help="Measure the same prompt without speculation, side by side.")]


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
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    params = _params(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    llm = _load(console, deployment, context.params, quiet=quiet)
    asked: Prompt = prompt if raw else [{"role": "user", "content": prompt}]
    run = _answer(llm, asked, params, console, show=not as_json)
    comparison = _compare(llm, asked, params, console) if compare else None
    if as_json:
        typer.echo(json.dumps(_report(run, comparison), indent=2))
    elif not quiet:
        for line in _summary(llm, run, comparison):
            console.print(line, soft_wrap=True)
    if comparison is not None and not comparison.same_tokens and temperature == 0:
        console.print("[yellow]The two answers differ: in bfloat16 a near-tie may, in float32 it is a fault.")
        raise typer.Exit(1)


def _params(**given: Any) -> SamplingParams:
    from pydantic import ValidationError

    from dflash_serve.common.settings import describe
    from dflash_serve.errors import UserError
    from dflash_serve.speculation.params import SamplingParams

    try:
        return SamplingParams(**given)
    except ValidationError as error:
        raise UserError(describe(error)) from None


def _load(console: Console, path: Path | None, given: Mapping[str, Any], *, quiet: bool) -> LLM:
    from dflash_serve.backend import embedded_backend
    from dflash_serve.deployment import load_deployment
    from dflash_serve.llm import LLM

    flags = options.deployment_flags({**given, "max_batch_size": 1})
    if path is None and given["target"] in (None, options.BUNDLED):
        flags |= {"target": {"model": options.BUNDLED}, "drafter": {"model": given["drafter"] or options.BUNDLED}}
    described = name_drafter(load_deployment(path, flags), embedded_backend(), quiet=quiet)
    with console.status(f"loading {described.target.model} (the first time it is converted and measured)"):
        return LLM(described)


def _answer(llm: LLM, prompt: Prompt, params: SamplingParams, console: Console, *, show: bool) -> TimedRun:
    from dflash_serve.cli.figures import time_run

    def echo(text: str) -> None:
        if show:
            console.print(text, end="", markup=False, soft_wrap=True)

    run = time_run(llm.engine, prompt, params, echo)
    echo("\n\n")
    return run


def _compare(llm: LLM, prompt: Prompt, params: SamplingParams, console: Console) -> SpeedComparison:
    from dflash_serve.cli.figures import ROUNDS, compare_with_plain

    with console.status("the same prompt with and without speculation, in turns"):
        return compare_with_plain(llm.engine, [prompt] * ROUNDS, params)


def _survival(run: TimedRun) -> list[float | None]:
    """Survival of every slot that a step has verified."""
    statistics = run.output.statistics
    return statistics.survival(max(statistics.widths or (), default=1))


def _report(run: TimedRun, comparison: SpeedComparison | None) -> dict[str, Any]:
    output = run.output
    report = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "tokens": len(output.token_ids),
        "tokens_per_second": run.tokens_per_second,
        "acceptance_length": output.statistics.acceptance_length,
        "tokens_per_step": output.statistics.tokens_per_step,
        "survival": _survival(run),
        "widths": dict(sorted((output.statistics.widths or {}).items())),
    }
    return report if comparison is None else report | {"comparison": asdict(comparison)}


def _summary(llm: LLM, run: TimedRun, comparison: SpeedComparison | None) -> Iterator[str]:
    from dflash_serve.cli.figures import number, survival_text

    statistics = run.output.statistics
    yield f"{len(run.output.token_ids)} tokens, {number(run.tokens_per_second, 1)} tokens/s"
    if statistics.acceptance_length is not None:
        survival = survival_text(_survival(run))
        widths = ", ".join(f"{width}: {steps}" for width, steps in sorted((statistics.widths or {}).items()))
        yield f"acceptance length τ = {statistics.acceptance_length:.2f}; survival by slot {survival}"
        yield f"width ({llm.deployment.speculation.width}) x steps: {widths}"
    if comparison is not None:
        same = "identical tokens" if comparison.same_tokens else "DIFFERENT tokens"
        yield (
            f"without speculation {number(comparison.plain_tokens_per_second, 1)} tokens/s, "
            f"with {number(comparison.tokens_per_second, 1)}: [bold]{number(comparison.ratio, 2)}x[/bold] "
            f"(medians of {comparison.rounds} interleaved runs), {same}"
        )

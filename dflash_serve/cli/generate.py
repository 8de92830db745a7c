"""`dflash-serve generate`: stream one answer, and say what speculation was worth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_serve.deployment import Deployment, load_deployment

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_serve.backend import Engine, Prompt
    from dflash_serve.cli.comparison import Run
    from dflash_serve.speculation.params import SamplingParams

BUNDLED = "smollm2"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = BUNDLED,
    drafter: Annotated[str | None, typer.Option(help="Likewise; smollm2 goes with the bundled target.")] = None,
    block_size: Annotated[int | None, typer.Option(help="B, the anchor counted. [default: the drafter's]")] = None,
    width: Annotated[str, typer.Option(help="Slots verified a step: a number, auto or off.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure the same prompt without speculation, side by side.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON at the end instead of text.")] = False,
) -> None:
    """Stream an answer, then print acceptance length, survival and speed."""
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    if drafter is None and target == BUNDLED:
        drafter = BUNDLED
    flags: dict[str, Any] = {
        "target": {"model": target},
        "drafter": {"model": drafter},
        "speculation": {"block_size": block_size, "width": width},
        "hardware": {"dtype": dtype},
        "limits": {"max_batch_size": 1},
    }
    deployment = load_deployment(flags=flags)
    params = _params(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    engine = _start(deployment, console)
    asked: Prompt = prompt if raw else [{"role": "user", "content": prompt}]
    run, report = _run(engine, asked, params, console, compare, show=not as_json)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(console, deployment, run, report)
    if compare and not report["comparison"]["same_tokens"] and temperature == 0:
        console.print("[yellow]The two answers differ: in bfloat16 a near-tie may, in float32 it is a fault.")
        raise typer.Exit(1)


def _params(**given: Any) -> SamplingParams:
    from pydantic import ValidationError

    from dflash_serve.deployment import describe
    from dflash_serve.errors import UserError
    from dflash_serve.speculation.params import SamplingParams

    try:
        return SamplingParams(**given)
    except ValidationError as error:
        raise UserError(describe(error)) from None


def _start(deployment: Deployment, console: Console) -> Engine:
    from dflash_serve.backend import embedded_backend

    with console.status(f"loading {deployment.target.model} (the first time it is converted and measured)"):
        return embedded_backend().engine(deployment)


def _run(
    engine: Engine, prompt: Prompt, params: SamplingParams, console: Console, compare: bool, *, show: bool
) -> tuple[Run, dict[str, Any]]:
    from dflash_serve.cli.comparison import compare_with_plain, timed

    def echo(text: str) -> None:
        if show:
            console.print(text, end="", markup=False, soft_wrap=True)

    run = timed(engine, prompt, params, echo)
    echo("\n\n")
    output = run.output
    report = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "tokens": len(output.token_ids),
        "tokens_per_second": run.tokens_per_second,
        "acceptance_length": output.statistics.acceptance_length,
        "tokens_per_step": output.statistics.tokens_per_step,
        "survival": output.statistics.survival(max(output.statistics.widths or (), default=1)),
        "widths": output.statistics.widths,
    }
    if compare:
        with console.status("the same prompt with and without speculation, in turns"):
            report["comparison"] = compare_with_plain(engine, prompt, params, run)
    return run, report


def _print(console: Console, deployment: Deployment, run: Run, report: dict[str, Any]) -> None:
    for line in _summary(deployment, report):
        console.print(line, soft_wrap=True)


def _summary(deployment: Deployment, report: dict[str, Any]) -> Iterator[str]:
    speed = report["tokens_per_second"]
    yield f"{report['tokens']} tokens, {_number(speed)} tokens/s"
    if report["acceptance_length"] is not None:
        survival = " ".join(_number(value, 2) for value in report["survival"])
        widths = ", ".join(f"{width}: {steps}" for width, steps in report["widths"].items())
        yield f"acceptance length τ = {_number(report['acceptance_length'], 2)}; survival by slot {survival}"
        yield f"width ({deployment.speculation.width}) x steps: {widths}"
    if "comparison" in report:
        beside = report["comparison"]
        same = "identical tokens" if beside["same_tokens"] else "DIFFERENT tokens"
        yield (
            f"without speculation {_number(beside['plain_tokens_per_second'])} tokens/s, "
            f"with {_number(beside['tokens_per_second'])}: [bold]{_number(beside['ratio'], 2)}x[/bold] "
            f"(medians of {beside['rounds']} interleaved runs), {same}"
        )


def _number(value: float | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"

"""`dflash-serve bench`: is speculation faster at your load? A sweep by aiperf, interleaved, and its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_serve.backend import EMBEDDED, ServerBackend, server_backend
from dflash_serve.cli.extras import need
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError, raise_problems

if TYPE_CHECKING:
    from dflash_serve.proving.bench.bench import Bench
    from dflash_serve.proving.bench.results import Run
    from dflash_serve.proving.bench.ways import Way


def bench(
    deployment: Annotated[Path | None, typer.Argument(help="YAML file of what to serve at each of --ways.")] = None,
    target: Annotated[str | None, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    backend_name: Annotated[str, typer.Option("--backend", help="Which engine serves.")] = EMBEDDED,
    ways: Annotated[str, typer.Option(help="Of off, fixed (the whole block), auto and numbers.")] = "off,fixed,auto",
    endpoint: Annotated[
        list[str] | None, typer.Option(help="NAME=http://host:port of a running server; more than once for more.")
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="FILE.jsonl of {'prompt': ...}, humaneval, hf:ORG/NAME, speed_bench_coding=FILE, spec_al_..."
        ),
    ] = "humaneval",
    concurrency: Annotated[str, typer.Option(help="Users at once, one run each.")] = "1,2,4,8,16,32",
    rounds: Annotated[int, typer.Option(help="Runs of each kind; medians are reported.", min=1)] = 3,
    requests_per_user: Annotated[int, typer.Option(help="Requests of a run for each user.", min=1)] = 4,
    min_requests: Annotated[int, typer.Option(help="Requests of a run at least.", min=1)] = 8,
    output_tokens: Annotated[int, typer.Option(help="Longest answer.", min=2)] = 128,
    ignore_eos: Annotated[bool, typer.Option(help="Make every answer that long.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    interactivity: Annotated[
        float | None, typer.Option(help="Tokens/s/user to compare at. [default: the most that both reach]", min=0)
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Way to compare with. [default: off, or the first]")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Their key. [default: the environment's DFLASH_SERVE_API_KEY]")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id. [default: the target's]")] = None,
    hardware: Annotated[str | None, typer.Option(help="What servers elsewhere run on, for the report.")] = None,
    devices: Annotated[int | None, typer.Option(help="Divides throughput. [default: hardware.count]", min=1)] = None,
    in_turn: Annotated[
        bool | None, typer.Option(help="One server at a time. [default: not with the embedded backend]")
    ] = None,
    warm_up: Annotated[bool, typer.Option(help="Each server first answers a request for each user.")] = True,
    output: Annotated[Path, typer.Option(help="Folder of runs and report; what is there is kept.")] = Path("bench"),
) -> None:
    """Measure throughput and interactivity with and without speculation, side by side.

    Interrupt it when you like: finished runs are kept, and the same command goes on with the rest.
    """
    need("bench", "httpx", "matplotlib", "prometheus_client")
    from dflash_serve.common.http import read_api_key
    from dflash_serve.proving.bench.bench import Bench
    from dflash_serve.proving.bench.dataset import load_dataset
    from dflash_serve.proving.bench.plan import Sweep, Workload

    described = _described(deployment, target, drafter)
    chosen = server_backend(backend_name) if described else None
    compared = _compared(described, chosen, ways, endpoint or [], baseline)
    prompts = load_dataset(dataset)
    _run(
        Bench(
            ways=compared,
            dataset=prompts,
            workload=Workload(
                dataset=prompts.name,
                prompts_sha256=prompts.sha256,
                output_tokens=output_tokens,
                ignore_eos=ignore_eos,
                temperature=temperature,
            ),
            sweep=Sweep(
                concurrencies=_numbers(concurrency),
                rounds=rounds,
                requests_per_user=requests_per_user,
                min_requests=min_requests,
            ),
            output=output,
            backend=chosen,
            tokenizer=tokenizer or (_tokenizer(described.target.model) if described else None),
            api_key=read_api_key(api_key_file),
            in_turn=(backend_name != EMBEDDED) if in_turn is None else in_turn,
            warm_up=warm_up,
            baseline=baseline,
            interactivity=interactivity,
            hardware=hardware,
            devices=devices or (described.hardware.count if described else 1),
        )
    )


def _run(asked: Bench) -> None:
    """Runs it; however it ends, what is finished is told."""
    try:
        files = asked.run(_tell)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted: finished runs are in {asked.output}; the same command goes on with the rest", err=True
        )
        raise typer.Exit(130) from None
    except UserError as error:
        if (asked.output / "runs").is_dir():
            typer.echo(f"finished runs are in {asked.output}; the same command goes on with the rest", err=True)
        raise error
    typer.echo(json.loads(files[0].read_text(encoding="utf-8"))["sentence"])
    typer.echo(f"report: {files[-1]}")


def _tell(run: Run, done: int, planned: int) -> None:
    length, rate = run.acceptance.acceptance_length, run.interactivity
    figures = [f"{run.throughput:.1f} tokens/s", "? tokens/s/user" if rate is None else f"{rate:.1f} tokens/s/user"]
    figures += [] if length is None else [f"τ {length:.2f}"]
    figures += [f"{run.errors} failed"] if run.errors else []
    where = f"{run.way}, {run.concurrency} users, round {run.round + 1}"
    typer.echo(f"[{done}/{planned}] {where}: {', '.join(figures)}")


def _described(file: Path | None, target: str | None, drafter: str | None) -> Deployment | None:
    if file is None and target is None:
        return None
    return load_deployment(file, {"target": {"model": target}, "drafter": {"model": drafter}})


def _compared(
    described: Deployment | None,
    chosen: ServerBackend | None,
    ways: str,
    endpoints: Sequence[str],
    baseline: str | None,
) -> list[Way]:
    from dflash_serve.proving.bench.ways import endpoint_ways, ways_of

    started = ways_of(described, [word.strip() for word in ways.split(",")]) if described else []
    for way in started:
        if chosen is not None and way.deployment is not None:
            raise_problems(chosen.check(way.deployment))
    compared = [*started, *endpoint_ways(endpoints)]
    names = [way.name for way in compared]
    if not compared:
        do = "give a deployment.yaml, --target and --drafter, or --endpoint NAME=http://host:port"
        raise UserError("nothing to measure", where="bench", do=do)
    if len(names) > len(set(names)):
        raise UserError("two ways have the same name", where="--endpoint", do="give the endpoint another one")
    if baseline is not None and baseline not in names:
        raise UserError(f"there is no way {baseline!r}", where="--baseline", do=f"use one of: {', '.join(names)}")
    return compared


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise UserError(f"{text!r} is no list of numbers of users", where="--concurrency", do="give 1,2,4,8")
    return tuple(sorted({int(word) for word in words}))


def _tokenizer(target: str) -> str:
    """The bundled target's folder; any other name as it is."""
    from dflash_serve.checkpoint.source import target_source

    return str(target_source(target))

"""`dflash-serve verify`: does speculation change anything? Exit code 0: no; 1: yes; 2: it could not be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_serve.backend import EMBEDDED, Prompt
from dflash_serve.cli.extras import need
from dflash_serve.cli.generate import BUNDLED
from dflash_serve.cli.resumable import resumable
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_serve.proving.lossless.pairs import Dtype
    from dflash_serve.proving.lossless.plan import Plan
    from dflash_serve.proving.lossless.sides import Pair

BUNDLED_LIMITS = {"max_batch_size": 16, "max_model_len": 1024}


def verify(
    deployment: Annotated[Path | None, typer.Argument(help="YAML file to run with and without its drafter.")] = None,
    with_url: Annotated[str | None, typer.Option("--with", help="A server that speculates.")] = None,
    without_url: Annotated[str | None, typer.Option("--without", help="The same without speculation.")] = None,
    target: Annotated[str | None, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    backend_name: Annotated[str, typer.Option("--backend", help="Which engine runs the deployment.")] = EMBEDDED,
    block_size: Annotated[int | None, typer.Option(help="B, the anchor counted. [default: the drafter's]")] = None,
    width: Annotated[str | None, typer.Option(help="Slots verified a step: a number or auto.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; of servers: what they compute in. [default: bfloat16]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of the servers. [default: the first that each lists]")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="With the servers' key. [else DFLASH_SERVE_API_KEY]")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight to a server.", min=1)] = 16,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of {'prompt': ...}. [default: bundled ones]")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send texts as they are, without a chat template.")] = False,
    greedy: Annotated[int | None, typer.Option(help="Prompts to compare greedily. [default: all]", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest greedy answer, in tokens.", min=1)] = 128,
    samples: Annotated[
        int | None,
        typer.Option(help="Sampled answers a side and case; 0: greedy only. [default: 1024; embedded: 256]", min=0),
    ] = None,
    false_alarm: Annotated[float, typer.Option(help="Of the sampled cases, all together.", min=1e-6, max=0.5)] = 1e-3,
    penalties: Annotated[bool, typer.Option(help="Verify requests with penalties, too.")] = True,
    same_seeds: Annotated[
        bool | None, typer.Option(help="Seeded answers must agree. [default: embedded in float32]")
    ] = None,
    output: Annotated[Path, typer.Option(help="The report.")] = Path("verify-report.json"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted verification.")] = False,
) -> None:
    """Prove that speculation changed nothing, on any engine; or show what it changed."""
    need("prove", "httpx", "numpy", "prometheus_client")
    from rich.console import Console

    from dflash_serve.prompts.prompt_set import read_prompt_set
    from dflash_serve.proving.lossless import pairs
    from dflash_serve.proving.lossless.plan import Plan, prompts_digest

    asked: list[Prompt] = read_prompt_set(prompts, raw=raw)
    flags: dict[str, Any] = {
        "target": {"model": target},
        "drafter": {"model": drafter},
        "speculation": {"block_size": block_size, "width": width},
        "hardware": {"dtype": dtype},
    }
    embedded = not (with_url or without_url) and backend_name == EMBEDDED
    settings: dict[str, Any] = {
        "prompts": min(greedy or len(asked), len(asked)),
        "prompts_sha256": prompts_digest(asked),
        "max_tokens": max_tokens,
        "samples": samples if samples is not None else _samples(embedded),
        "false_alarm": false_alarm,
        "penalties": penalties,
    }
    console = Console(highlight=False)
    if with_url or without_url:
        _refuse({"deployment.yaml": deployment, "--target": target, "--drafter": drafter, "--width": width})
        pair = pairs.servers(with_url, without_url, model, api_key_file, concurrency)
        plan = Plan(**settings, dtype=_dtype(dtype), same_seeds=bool(same_seeds))
    else:
        described = _described(deployment, flags)
        if backend_name == EMBEDDED:
            pair, found = pairs.embedded(described)
            agree = found == "float32" if same_seeds is None else same_seeds
            plan = Plan(**settings, dtype=found, same_seeds=agree)
        else:
            pair = pairs.launched(backend_name, described, concurrency)
            plan = Plan(**settings, dtype=_dtype(described.hardware.dtype), same_seeds=bool(same_seeds))
    raise typer.Exit(_run(plan, asked, pair, output, resume, console))


def _samples(embedded: bool) -> int:
    """Four times as many show deviations half as large; seeds show more than both, where an engine keeps them."""
    return 256 if embedded else 1024


def _described(path: Path | None, flags: dict[str, Any]) -> Deployment:
    """The deployment; the bundled pair where nothing is named."""
    if path is None and flags["target"]["model"] in (None, BUNDLED):
        drafter = flags["drafter"]["model"] or BUNDLED
        flags = {**flags, "target": {"model": BUNDLED}, "drafter": {"model": drafter}, "limits": BUNDLED_LIMITS}
    found = load_deployment(path, flags)
    if found.drafter is None or found.speculation.width in ("off", 1):
        raise UserError("it does not speculate", where=str(path or "verify"), do="name a drafter, and no width of off")
    return found


def _refuse(given: dict[str, object]) -> None:
    """What running servers have of their own."""
    for name, value in given.items():
        if value is not None:
            raise UserError("running servers have their own", where=name, do="leave it out, or --with and --without")


def _dtype(given: str | None) -> Dtype:
    """Servers compute in bfloat16 unless somebody says otherwise."""
    if given not in (None, "auto", "float32", "bfloat16"):
        raise UserError(f"{given!r} is not float32 or bfloat16", where="--dtype")
    return "float32" if given == "float32" else "bfloat16"


def _run(plan: Plan, prompts: Sequence[Prompt], pair: Pair, output: Path, resume: bool, console: Console) -> int:
    """Verifies, writes the report and shows it; the exit code."""
    from dflash_serve.proving.lossless.display import show
    from dflash_serve.proving.lossless.findings import EXIT_CODES
    from dflash_serve.proving.lossless.report import report_of, write_report
    from dflash_serve.proving.lossless.verification import Verification

    belongs_to = {"plan": plan.model_dump(mode="json"), "sides": pair.facts}
    with resumable(output, belongs_to, "finished answers", resume=resume) as journal:
        with _progress() as progress:
            findings = Verification(plan, prompts, pair, journal, progress).run()
        report = report_of(plan, pair.facts, findings)
        write_report(report, output)
    show(report, console)
    console.print(f"report: {output}", soft_wrap=True)
    return EXIT_CODES[findings.verdict]


@contextmanager
def _progress() -> Iterator[Any]:
    from rich.console import Console

    with Console(stderr=True).status("verifying") as status:
        counts: dict[str, int] = {}

        def told(what: str, count: int) -> None:
            counts[what] = counts.get(what, 0) + count
            status.update(f"{what}: {counts[what]} answers")

        yield told

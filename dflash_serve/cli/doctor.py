"""`dflash-serve doctor`: explains low acceptance. Exit codes: 0 healthy, 1 a fault was found, 3 undecided."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_serve.backend import Engine, Prompt, embedded_backend, template_variables
from dflash_serve.checkpoint.files import file_entries
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_folder
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair, number, survival_text
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.extras import need
from dflash_serve.common.files import write_whole
from dflash_serve.common.http import read_api_key
from dflash_serve.common.store import resumable
from dflash_serve.deployment import load_deployment
from dflash_serve.doctor.diagnosis import Verdict
from dflash_serve.doctor.evidence import DiagnosableBackend, Interview, Observation, interview
from dflash_serve.errors import UserError
from dflash_serve.prompts import context_needed, prompts_digest, read_prompt_set, template_kwargs
from dflash_serve.speculation.params import SamplingParams

if TYPE_CHECKING:
    from dflash_serve.doctor.diagnosis import SuspectReport
    from dflash_serve.doctor.examination import PairReport

URL = "Address of a running server of this pair. It must have no other clients meanwhile."
Url = Annotated[str | None, typer.Option(help=URL)]
SEEN = "Acceptance length of a server that cannot be asked."
Observed = Annotated[float | None, typer.Option(help=SEEN, min=1)]
NumPrompts = Annotated[int, typer.Option(help=options.NUM_PROMPTS, min=2)]
MaxTokens = Annotated[int, typer.Option(help=options.MAX_TOKENS, min=8)]
Progress = Callable[[str, int], None]
"""Called with the name of what is about to run, and how many of its kind there are."""
LINE_SECONDS = 20.0  # between two lines of progress where stderr is no terminal
SHOWN = 8  # Explanations that are printed; the JSON has all


@dataclass(frozen=True)
class ExaminedPair:
    """The examined target and drafter, as named by the user (a commit by its folder), and their prompts."""

    target: str
    drafter: str
    block_size: int | None
    dtype: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams  # Greedy

    @property
    def drafter_block_size(self) -> int:
        return read_config(self.drafter)[0].block_size


def doctor(
    context: typer.Context,
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    url: Url = None,
    metrics_url: options.MetricsUrl = None,
    observed: Observed = None,
    model: options.ServedModel = None,
    api_key_file: options.ApiKeyFile = None,
    block_size: options.BlockSize = None,
    dtype: options.Dtype = None,
    prompts: options.PromptFile = None,
    chat_template_kwargs: options.TemplateKwargs = None,
    num_prompts: NumPrompts = 16,
    max_tokens: MaxTokens = 64,
    output: options.Report = Path("doctor-report.json"),
    resume: options.Resume = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Explain low acceptance: of a server, or of a pair whose checkpoint may have a wrong setting."""
    need("prove", "httpx", "numpy", "prometheus_client", "scipy")
    if url is not None and observed is not None:
        raise UserError("the server reports it", where="--observed", do="leave it out, or --url")
    if not options.names_target(deployment, target) and (url is not None or observed is not None):
        do = "give a deployment.yaml, or --target and --drafter"
        raise UserError("it is not said which pair the server has", where="doctor", do=do)
    if url is None:
        options.refuse_ignored(
            context, ("metrics_url", "model", "api_key_file"), "no server is asked", "give --url, too"
        )
    asked = tuple(read_prompt_set(prompts, variables=template_kwargs(chat_template_kwargs))[:num_prompts])
    pair = _examined_pair(deployment, context.params, asked)
    urls = tuple(metrics_url or ())
    endpoint = Endpoint(url, model, read_api_key(api_key_file), metrics_urls=urls) if url else None
    with _progress(quiet=quiet) as advance:

        def answered() -> None:
            advance("asking the server", len(asked))

        told = interview(endpoint, asked, pair.params, pair.drafter_block_size, answered) if endpoint else None
        report = _examine(pair, told, observed, output, resume, advance)
    if as_json:
        typer.echo(output.read_text(encoding="utf-8"), nl=False)
    else:
        _show(report, None if quiet else output)
    raise typer.Exit(report.verdict.exit_code)


def _examined_pair(path: Path | None, given: Mapping[str, Any], prompts: tuple[Prompt, ...]) -> ExaminedPair:
    flags = options.deployment_flags({**given, "api_key_file": None})  # the option's file is the key of the server
    found = described_pair(path, flags, embedded_backend(), quiet=given["quiet"])
    if found.drafter is None:
        raise UserError("there is no drafter", where="doctor", do="give --drafter")
    drafter = found.drafter.model
    if found.drafter.revision is not None:  # the folder of that commit, and no other
        drafter = str(drafter_folder(drafter, found.drafter.revision))
    params = SamplingParams(temperature=0, max_tokens=given["max_tokens"])
    return ExaminedPair(
        found.target.model, drafter, found.speculation.block_size, found.hardware.dtype, prompts, params
    )


def _examine(
    pair: ExaminedPair, told: Interview | None, observed: float | None, output: Path, resume: bool, advance: Progress
) -> SuspectReport | PairReport:
    from dflash_serve.doctor.examination import Examination

    advance("loading target and drafter", 1)
    backend, block_size = embedded_backend(), pair.block_size
    if not isinstance(backend, DiagnosableBackend):
        do = "install this dflash-serve with its extra [torch]"
        raise UserError("it cannot be given faults on purpose", where=f"backend {backend.name}", do=do)
    width = told.width if told else block_size or pair.drafter_block_size
    if told is not None and block_size is None and told.engine != "dflash-serve":
        block_size = told.width  # other engines draft as many slots as they verify
    engine = _engine(backend, pair, block_size, width)
    steps = told.steps if told else None
    reference = backend.reference(engine, pair.drafter, pair.prompts, pair.params, width, steps)

    def first_difference() -> object | None:
        advance("comparing tensors with transformers", 1)
        return backend.first_difference(engine, pair.target, pair.drafter, pair.prompts[0])

    belongs_to = _belongs_to(pair, engine, width) | ({} if steps is None else {"steps": [dict(one) for one in steps]})
    with resumable(output, belongs_to, "finished probes", resume=resume) as store:
        examination = Examination(reference, store, advance)
        report: SuspectReport | PairReport
        if told is not None:
            observation = replace(told.observation, errors=reference.order_errors())
            report = examination.examine_suspect(observation)
            report = report.model_copy(update={"notes": (*report.notes, *told.notes)})
        elif observed is not None:
            report = examination.examine_suspect(Observation.of_length(observed))
        else:
            report = examination.examine_pair(first_difference)
        text = json.dumps({"pair": belongs_to, **report.model_dump(mode="json")}, indent=1, ensure_ascii=False)
        write_whole(output, text + "\n", do="name another --output")
    return report


def _engine(backend: DiagnosableBackend, pair: ExaminedPair, block_size: int | None, width: int) -> Engine:
    room = context_needed(pair.target, pair.prompts, pair.params.max_tokens or 0)
    flags = {
        "target": {"model": pair.target},
        "drafter": {"model": pair.drafter},
        "speculation": {"block_size": block_size, "width": width},
        "hardware": {"dtype": pair.dtype},
        "limits": {"max_batch_size": len(pair.prompts), "max_model_len": room},
    }
    return backend.engine(load_deployment(flags=flags))


def _belongs_to(pair: ExaminedPair, engine: Engine, width: int) -> dict[str, object]:
    """The settings that a probe's counts depend on."""
    return {
        "target": pair.target,
        "drafter": {name: entry.sha256 for name, entry in file_entries(drafter_folder(pair.drafter)).items()},
        "prompts": prompts_digest(pair.prompts),
        "chat_template_kwargs": template_variables(pair.prompts[0]),
        "max_tokens": pair.params.max_tokens,
        "block_size": engine.block_size,
        "width": width,
        "dtype": engine.dtype,
    }


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress]:
    console = Console(stderr=True, quiet=quiet)
    with console.status("starting") as status:
        began, done, told = dict[int, float](), Counter[int](), 0.0

        def advance(name: str, count: int) -> None:
            nonlocal told
            now = time.monotonic()
            began.setdefault(count, now)
            line = name if count == 1 else f"{name} ({done[count] + 1} of {count})"
            if count > 1 and done[count]:
                left = (now - began[count]) / done[count] * (count - done[count])
                line += f", about {left:.0f} s left"
            done[count] += 1
            status.update(line)
            if not console.is_terminal and now - told >= LINE_SECONDS:
                told = now
                console.print(line)

        yield advance


def _show(report: SuspectReport | PairReport, output: Path | None) -> None:
    from dflash_serve.doctor.diagnosis import SuspectReport

    console = Console(highlight=False, markup=False, emoji=False)
    colour = {Verdict.HEALTHY: "green", Verdict.FAULT: "red", Verdict.UNCLEAR: "yellow"}[report.verdict]
    console.print(f"\n{report.verdict}", style=f"bold {colour}")
    for sentence in report.sentences:
        console.print(f"  {sentence}")
    if isinstance(report, SuspectReport):
        console.print(_table(report))
        if report.cannot_be_told_from_healthy and report.verdict == Verdict.HEALTHY:
            console.print(f"cannot be told from healthy by this: {', '.join(report.cannot_be_told_from_healthy)}")
    for note in report.notes:
        console.print(f"note: {note}")
    if output is not None:
        console.print(f"report: {output}", soft_wrap=True)


def _table(report: SuspectReport) -> Table:
    table = Table("explanation", "τ", "survival by slot", "probability", "how it comes about")
    observed = report.observed
    table.add_row("(observed)", number(observed.acceptance_length, 3), survival_text(observed.survival), "", "")
    for row in report.explanations[:SHOWN]:
        length, survival = number(row.predicted.acceptance_length, 3), survival_text(row.predicted.survival)
        table.add_row(row.name, length, survival, f"{row.posterior:.2g}", row.says)
    return table

"""The doctor as one function: a deployment, prompts and perhaps its server -> a report in a file.

The reference is the embedded engine, which gets the whole deployment. Settings of the server that change no draft
(`SERVER_ONLY`) are left out, and the report's notes name them; any other setting that the embedded engine cannot honour
is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_serve.adapter.checks import block_size_of, uses_drafter
from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.answers.engine import Engine, Prompt, template_variables
from dflash_serve.answers.prompts import context_needed, prompts_digest, with_variables
from dflash_serve.checkpoint.files import file_entries
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_folder
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import NoAnswerError
from dflash_serve.common.progress import doing
from dflash_serve.common.reports import write_json
from dflash_serve.common.store import resumable
from dflash_serve.deployment.description import Deployment, KVCacheSettings, Limits, Parallel, Serving
from dflash_serve.doctor.diagnosis import SuspectReport
from dflash_serve.doctor.evidence import DiagnosableBackend, Interview, Observation, interview
from dflash_serve.doctor.examination import Examination, PairReport
from dflash_serve.doctor.lengths import Fall, LengthFigures, causes, fall_of, fall_of_prompts, figures_of_report
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.speculation.params import SamplingParams

SERVER_ONLY: Mapping[str, Mapping[str, Any]] = {
    "parallel": Parallel().model_dump(),
    "serving": Serving().model_dump(),
    "hardware": {"count": 1},
    "kv_cache": {name: KVCacheSettings().model_dump()[name] for name in ("block_reuse", "memory_fraction")},
    "limits": {name: Limits().model_dump()[name] for name in ("max_queued_requests", "max_num_tokens")},
}
"""Settings, by section, that say how a server spreads and schedules its work, and their values in the reference."""

HANGS = "if its start hangs, find the rank that the others wait for: docs/faults.md, 'A start that hangs'"


def examine(
    deployment: Deployment,
    prompts: Sequence[Prompt],
    output: Path,
    *,
    endpoint: Endpoint | None = None,
    observed: float | None = None,
    lengths: Path | None = None,
    max_tokens: int = 64,
    resume: bool = False,
) -> SuspectReport | PairReport:
    """Explains the acceptance of a deployment's server, or looks for better settings of its drafter's checkpoint.

    Args:
        deployment: whole, as it is served; its drafter is named (not `auto`).
        prompts: with their template variables.
        output: file for the report.
        endpoint: the deployment's server; None = no server is asked.
        observed: acceptance length of a server that cannot be asked.
        lengths: report of `evaluate --by length`, whose acceptance by context length is explained, too.
        max_tokens: length of the longest answer.
        resume: go on with an interrupted examination.

    Raises:
        UserError: a setting that the reference cannot honour, or a server that cannot be asked.
    """
    reference, left_out = reference_deployment(deployment, prompts, max_tokens)
    backend = _diagnosable()
    measured = figures_of_report(lengths) if lengths else []
    with doing("checking the deployment"):
        raise_problems(backend.launch(reference).problems)  # before a server is asked for minutes
    params, most = SamplingParams(temperature=0, max_tokens=max_tokens), widest(reference)
    with _hint_of_hangs(deployment):
        told = interview(endpoint, prompts, params, most) if endpoint is not None else None
    width, steps = (told.width, told.steps) if told else (most, None)
    reference = _at_width(reference, width, told)
    engine = backend.engine(reference)
    made_by = _made_by(reference, prompts, max_tokens, engine, steps)
    sound = backend.reference(engine, reference, prompts, params, width, steps)

    def first_difference() -> object | None:
        with doing("comparing tensors with transformers"):
            return backend.first_difference(engine, reference, prompts[0])

    with resumable(output, made_by, "finished probes", resume=resume) as store:
        examination = Examination(sound, store)
        report: SuspectReport | PairReport
        if told is not None:
            observation = replace(told.observation, errors=sound.order_errors())
            report = examination.examine_suspect(observation)
            left_out = [*told.notes, *left_out]
        elif observed is not None:
            report = examination.examine_suspect(Observation.of_length(observed))
        else:
            report = examination.examine_pair(first_difference)
        by_length = [*_measured_fall(reference, measured), *_observed_fall(reference, told, examination)]
        said = {"sentences": [*report.sentences, *by_length], "notes": (*report.notes, *left_out)}
        report = report.model_copy(update=said)
        write_json(output, {"pair": made_by, **report.model_dump(mode="json")})
    return report


def _measured_fall(deployment: Deployment, measured: list[LengthFigures]) -> Iterator[str]:
    """The fall of acceptance with context length in a report of our own engine, explained."""
    if (fall := fall_of(measured)) is not None:
        yield f"{fall}: {_causes(deployment, fall)}"


def _observed_fall(deployment: Deployment, told: Interview | None, examination: Examination) -> Iterator[str]:
    """The fall of a server's acceptance with the length of its prompts, beside that of the reference."""
    each = told.observation.each if told else None
    contexts = told.contexts if told else ()
    if each is not None and (found := fall_of_prompts(each, examination.sound(), contexts)) is not None:
        fall, whose = found
        yield f"{fall}, {whose}: {_causes(deployment, fall)}"


def _causes(deployment: Deployment, fall: Fall) -> str:
    assert deployment.drafter is not None
    drafter, _ = read_config(deployment.drafter.model, deployment.drafter.revision)
    return causes(fall, drafter, deployment.speculation.draft_window)


@contextmanager
def _hint_of_hangs(deployment: Deployment) -> Iterator[None]:
    """A server of several ranks that does not answer may hang at its start."""
    try:
        yield
    except NoAnswerError as error:
        if deployment.hardware.count == 1:
            raise
        raise UserError(error.what, where=error.where, do=f"{error.do}; {HANGS}") from None


def _diagnosable() -> DiagnosableBackend:
    backend = embedded_backend()
    if not isinstance(backend, DiagnosableBackend):
        do = "install this dflash-serve with its extra [torch]"
        raise UserError("it cannot be given faults on purpose", where=f"backend {backend.name}", do=do)
    return backend


def reference_deployment(
    deployment: Deployment, prompts: Sequence[Prompt], max_tokens: int
) -> tuple[Deployment, list[str]]:
    """The deployment as the embedded engine serves it for the prompts, and notes on settings of the server alone.

    Its limits are those of the deployment, but no higher than the prompts need.

    Raises:
        UserError: it does not speculate.
    """
    if deployment.drafter is None:
        raise UserError("there is no drafter", where="doctor", do="give --drafter")
    if not uses_drafter(deployment):
        what = f"speculation.width is {deployment.speculation.width}: nothing is drafted"
        raise UserError(what, where="doctor", do="give a deployment with another width")
    sections = {name: getattr(deployment, name).model_copy(update=dict(values)) for name, values in SERVER_ONLY.items()}
    limits, room = sections["limits"], context_needed(deployment.target, prompts, max_tokens)
    fitted = {
        "max_batch_size": min(limits.max_batch_size or len(prompts), len(prompts)),
        "max_model_len": min(limits.max_model_len or room, room),
    }
    sections["limits"] = limits.model_copy(update=fitted)
    named = sorted(_server_only(deployment))
    notes = [f"the reference does without settings of the server alone: {', '.join(named)}"] if named else []
    return deployment.model_copy(update={**sections, "role": "whole", "pair": None}), notes


def _server_only(deployment: Deployment) -> Iterator[str]:
    """Names of the deployment's settings that the reference does without."""
    if deployment.role != "whole":
        yield "role"
    if deployment.pair is not None:
        yield "pair"
    for section, values in SERVER_ONLY.items():
        given = getattr(deployment, section)
        yield from (f"{section}.{name}" for name, value in values.items() if getattr(given, name) != value)


def widest(deployment: Deployment) -> int:
    """Most slots that a step of the deployment verifies."""
    width = deployment.speculation.width
    return width if isinstance(width, int) else block_size_of(deployment)


def _at_width(reference: Deployment, width: int, told: Interview | None) -> Deployment:
    speculation = reference.speculation.model_copy(update={"width": width})
    if told is not None and speculation.block_size is None and told.engine != "dflash-serve":
        # Other engines draft as many slots as they verify.
        speculation = speculation.model_copy(update={"block_size": width})
    return reference.model_copy(update={"speculation": speculation})


def _made_by(
    reference: Deployment, prompts: Sequence[Prompt], max_tokens: int, engine: Engine, steps: Any
) -> dict[str, object]:
    """The settings that a probe's counts depend on."""
    assert reference.drafter is not None
    folder = drafter_folder(reference.drafter.model, reference.drafter.revision)
    found: dict[str, object] = {
        "deployment": reference.model_dump(mode="json", exclude_defaults=True),
        "drafter": {name: entry.sha256 for name, entry in file_entries(folder).items()},
        "prompts": prompts_digest(prompts),
        "chat_template_kwargs": template_variables(prompts[0]),
        "max_tokens": max_tokens,
        "block_size": engine.block_size,
        "width": reference.speculation.width,
        "dtype": engine.dtype,
    }
    return found if steps is None else found | {"steps": [dict(one) for one in steps]}


def examine_apart(
    deployment: Deployment,
    prompts: Sequence[Prompt],
    output: Path,
    *,
    url: str | None = None,
    observed: float | None = None,
    max_tokens: int = 64,
    resume: bool = False,
    seconds: float,
) -> None:
    """`examine` in a process of its own, which gives all memory of its models back when it ends.

    Raises:
        UserError: the examination ended with an error.
        subprocess.TimeoutExpired: it took more than `seconds`; finished probes are kept.
    """
    job = {
        "deployment": deployment.model_dump(mode="json"),
        "prompts": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts],
        "variables": [template_variables(prompt) for prompt in prompts],
        "output": str(output),
        "url": url,
        "options": {"observed": observed, "max_tokens": max_tokens, "resume": resume},
    }
    argv = [sys.executable, "-m", "dflash_serve.doctor"]
    done = subprocess.run(  # noqa: S603
        argv, input=json.dumps(job), capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode != 0:
        said = done.stderr.splitlines() or ["it said nothing"]
        raise UserError(said[-1], where="doctor")


def examine_job(text: str) -> None:
    """The examination that `examine_apart` describes as JSON.

    Raises:
        UserError: as `examine`.
    """
    job = json.loads(text)
    prompts = [with_variables(*pair) for pair in zip(job["prompts"], job["variables"], strict=True)]
    endpoint = Endpoint(job["url"]) if job["url"] else None
    deployment, output = Deployment.model_validate(job["deployment"]), Path(job["output"])
    examine(deployment, prompts, output, endpoint=endpoint, **job["options"])

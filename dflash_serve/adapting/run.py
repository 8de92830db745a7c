"""A whole adaptation: traffic, training from the served drafter, the gate, and a report.

The output folder has `traffic` (the prompts of either side), the run of `train` (`data`, checkpoints, `drafter`) and
`report.json`. A folder with anything in it is refused, and nothing outside of it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.adapting.gate import Answered, Change, GateVerdict, judge
from dflash_serve.adapting.traffic import LoggedRequest, Traffic, lines_of, read_traffic, split
from dflash_serve.answers.chat_template import encode_text, render_messages
from dflash_serve.answers.engine import RequestOutput, template_variables
from dflash_serve.answers.evaluation import answer_all, measurable
from dflash_serve.answers.groups import LabelledPrompt, labelled
from dflash_serve.answers.prompts import BUNDLED, context_needed, labelled_prompts
from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.files import file_entries
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.common.files import require_writable, sha256, write_whole
from dflash_serve.common.progress import shown
from dflash_serve.common.provenance import Environment, environment
from dflash_serve.common.reports import write_json
from dflash_serve.common.settings import Frozen
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.models.drafter import read_hot_tokens, takes_hot_tokens, write_hot_tokens
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.training.data import read_excluded
from dflash_serve.training.recipe import TrainingRecipe, TrainingSection
from dflash_serve.training.run import DRAFTER, check_recipe, choose_device
from dflash_serve.training.run import run as run_training
from dflash_serve.training.shards import load_answers, read_manifest, seen_vocabulary

REPORT, TRAFFIC = "report.json", "traffic"
TRAINING, HELD_OUT = "training.jsonl", "held-out.jsonl"


class AdaptSettings(Frozen):
    """Options of `adapt`."""

    training: TrainingSection
    max_tokens: int = 256  # of an answer, in training and in the gate
    held_out: float = 0.2  # share of the conversations
    allowed_loss: float = 0.05  # of τ on the general prompts, and in groups of the traffic
    general: Path | None = None  # None = the bundled prompts
    seed: int = 0


class PromptsUsed(Frozen):
    """One side of the split, or the general prompts."""

    prompts: int
    sha256: str  # of the file


class AdaptReport(Frozen):
    """Result of an adaptation. Prompts and answers are named by hash and never quoted."""

    verdict: GateVerdict
    reason: str
    target: str
    served: str
    drafter: str
    served_sha256: dict[str, str]  # File of the drafter -> hash
    drafter_sha256: dict[str, str]
    traffic: dict[str, str]  # Name of each log -> sha256
    left_out: dict[str, int]  # Reason -> requests
    training: PromptsUsed
    held_out: PromptsUsed
    general: PromptsUsed
    allowed_loss: float
    width: int
    max_tokens: int
    on_traffic: dict[str, dict[str, Change]]  # Dimension -> group -> change
    on_general: dict[str, dict[str, Change]]
    environment: Environment


@dataclass(frozen=True)
class Prepared:
    """All that an adaptation needs, before anything is written."""

    deployment: Deployment  # as it is measured: a fixed width, and room for every prompt
    served: Path  # the drafter's folder
    traffic: Traffic
    sides: Mapping[str, Sequence[LoggedRequest]]  # `TRAINING` and `HELD_OUT`
    general: Sequence[LabelledPrompt]
    recipe: TrainingRecipe


def prepare(deployment: Deployment, paths: Sequence[Path], output: Path, settings: AdaptSettings) -> Prepared:
    """Reads traffic and drafter, and splits what the target's template and context take.

    Raises:
        UserError: the traffic, the general prompts, the deployment or its drafter cannot be used.
    """
    general = labelled_prompts(settings.general or BUNDLED, task="general")
    deployment = measurable(deployment)
    assert deployment.drafter is not None
    served = drafter_folder(deployment.drafter.model, deployment.drafter.revision)
    config = read_config(served)[0]
    traffic = read_traffic(paths)
    prompts = [one.prompt for one in (*(_labelled(one) for one in traffic.requests), *general)]
    room = context_needed(deployment.target, prompts, settings.max_tokens)
    room = min(room, deployment.limits.max_model_len or room)
    usable = _usable(traffic, deployment, room - settings.max_tokens)
    sides = dict(zip((TRAINING, HELD_OUT), split(usable, settings.held_out), strict=True))
    width = deployment.speculation.width if isinstance(deployment.speculation.width, int) else config.block_size
    recipe = _recipe(deployment, served, config, output, settings, room)
    read_excluded(recipe.data.exclude)  # Its errors, before anything is written
    check_recipe(recipe, target_folder(deployment.target.model, deployment.target.revision))
    changes = {
        "limits": deployment.limits.model_copy(update={"max_model_len": room}),
        "speculation": deployment.speculation.model_copy(update={"width": width}),
    }
    measured = deployment.model_copy(update=changes)
    raise_problems(embedded_backend().launch(measured).problems)  # Before hours of training
    return Prepared(measured, served, traffic, sides, general, recipe)


def adapt(prepared: Prepared, output: Path, settings: AdaptSettings, *, resume: bool, device: str, quiet: bool) -> bool:
    """Trains, measures both drafters and writes the report; False if training was stopped, and --resume goes on.

    Raises:
        UserError: the folder has something else in it, or the run cannot be made.
    """
    place = choose_device(device)
    _claim(output, prepared, resume=resume)
    if not run_training(prepared.recipe, output, device=place, resume=resume, quiet=quiet):
        return False
    drafter = output / DRAFTER
    _keep_hot_tokens(prepared, output)
    held_out = [_labelled(request) for request in prepared.sides[HELD_OUT]]
    with shown(quiet=quiet):
        on_traffic, on_general = (
            answered.changes()
            for answered in compare(prepared.deployment, drafter, (held_out, prepared.general), settings.max_tokens)
        )
    verdict, reason = judge(on_traffic, on_general, settings.allowed_loss)
    general = settings.general or BUNDLED
    used = {
        name: PromptsUsed(prompts=len(requests), sha256=sha256(output / TRAFFIC / name))
        for name, requests in prepared.sides.items()
    }
    report = AdaptReport(
        verdict=verdict,
        reason=reason,
        target=prepared.deployment.target.model,
        served=str(prepared.served.name),
        drafter=str(drafter),
        served_sha256=_hashes(prepared.served),
        drafter_sha256=_hashes(drafter),
        traffic=prepared.traffic.files,
        left_out=dict(prepared.traffic.left_out),
        training=used[TRAINING],
        held_out=used[HELD_OUT],
        general=PromptsUsed(prompts=len(prepared.general), sha256=sha256(general)),
        allowed_loss=settings.allowed_loss,
        width=int(prepared.deployment.speculation.width),
        max_tokens=settings.max_tokens,
        on_traffic=on_traffic,
        on_general=on_general,
        environment=environment(),
    )
    write_json(output / REPORT, report)
    return True


def read_report(output: Path) -> AdaptReport:
    """The report of a finished run."""
    return AdaptReport.model_validate_json((output / REPORT).read_text(encoding="utf-8"))


def compare(
    deployment: Deployment, drafter: Path, sets: Sequence[Sequence[LabelledPrompt]], max_tokens: int
) -> list[Answered]:
    """Greedy answers to every set of prompts, with the deployment's drafter and with another one, at a fixed width."""
    assert deployment.drafter is not None
    assert isinstance(deployment.speculation.width, int)
    other = deployment.drafter.model_copy(update={"model": str(drafter), "revision": None})
    params, found = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0), list[list[list[RequestOutput]]]()
    for name, model in (("served drafter", deployment.drafter), ("new drafter", other)):
        engine = embedded_backend().engine(deployment.model_copy(update={"drafter": model}))
        fixed = engine.fixed(deployment.speculation.width)
        found.append([answer_all(fixed, [one.prompt for one in prompts], params, name) for prompts in sets])
    return [
        Answered(prompts=tuple(prompts), before=tuple(before), after=tuple(after))
        for prompts, before, after in zip(sets, *found, strict=True)
    ]


def _labelled(request: LoggedRequest) -> LabelledPrompt:
    return labelled(request.line["messages"], request.line, {}, where="--traffic")


def _usable(traffic: Traffic, deployment: Deployment, longest: int) -> list[LoggedRequest]:
    # Requests that the target's chat template takes and its context holds; the others are counted.
    tokenizer, found = load_tokenizer(deployment.target.model, deployment.target.revision), list[LoggedRequest]()
    for request in traffic.requests:
        variables = template_variables(_labelled(request).prompt)
        try:
            text = render_messages(tokenizer, request.line["messages"], variables)
            tokens = len(encode_text(tokenizer, text, special=False))
        except UserError as error:
            traffic.left_out[error.what] += 1
            continue
        if tokens > longest:
            traffic.left_out["too long for the context"] += 1
        else:
            found.append(request)
    return found


def _recipe(
    deployment: Deployment, served: Path, config: DrafterConfig, output: Path, settings: AdaptSettings, room: int
) -> TrainingRecipe:
    same = ("block_size", "mask_token_id", "target_layer_ids", "slots", "markov", "confidence", "convolution")
    target, general = deployment.target, str((settings.general or BUNDLED).resolve())
    fields = {
        "target": {"model": target.model, "revision": target.revision},
        "data": {
            "prompts": [{"kind": "conversations", "name": "traffic", "path": (output / TRAFFIC / TRAINING).resolve()}],
            "exclude": [general],
            "answers": {
                "max_prompt_tokens": room - settings.max_tokens,
                "max_new_tokens": settings.max_tokens,
                "max_batch_size": deployment.limits.max_batch_size,
            },
        },
        "drafter": {
            **{name: getattr(config, name) for name in same},
            "num_layers": config.num_layers,
            "intermediate_size": config.intermediate_size,
            "init": str(served.resolve()),
        },
        "training": settings.training.model_dump(exclude_unset=True),
        "seed": settings.seed,
    }
    return TrainingRecipe.model_validate(fields)


def _claim(output: Path, prepared: Prepared, *, resume: bool) -> None:
    # Writes both sides of the split, or finds the same there.
    if (output / REPORT).exists():
        raise UserError("it holds a finished run", where=str(output), do="give another --output")
    if not resume and output.exists() and any(output.iterdir()):
        raise UserError("it is not empty", where=str(output), do="give another --output, or go on with --resume")
    require_writable(output)
    (output / TRAFFIC).mkdir(exist_ok=True, mode=0o700)
    for name, requests in prepared.sides.items():
        path, text = output / TRAFFIC / name, lines_of(requests)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError("it was made from other traffic", where=str(path), do="give another --output")
        write_whole(path, text, private=True)


def _keep_hot_tokens(prepared: Prepared, output: Path) -> None:
    # Of the served drafter and of the traffic: a list of the traffic's tokens alone would lose the others.
    config = read_config(output / DRAFTER)[0]
    hot, manifest = read_hot_tokens(prepared.served, config.vocab_size), read_manifest(output / "data")
    if hot is None or manifest is None or not takes_hot_tokens(config):
        return
    answers, _ = load_answers(output / "data", manifest, validation_share=0.0, seed=prepared.recipe.seed)
    write_hot_tokens(output / DRAFTER, sorted({*hot, *seen_vocabulary(answers).tolist()}))


def _hashes(folder: Path) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in file_entries(folder).items()}

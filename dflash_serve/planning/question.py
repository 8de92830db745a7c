"""The question of a plan: pair, GPUs, load, limits and expected acceptance. All mistakes in it are found here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import ceil, inf
from pathlib import Path
from statistics import mean
from typing import Any

from pydantic import ValidationError

from dflash_serve.adapter.checks import (
    attention_head_problems,
    block_problems,
    check_pairing,
    expert_block_problems,
    length_problems,
)
from dflash_serve.adapter.launch import kv_bytes_each
from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, uniform_target_layer_ids
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import target_described
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, target_configuration
from dflash_serve.checkpoint.target_files import KEYS, TargetFiles, read_target
from dflash_serve.common.documents import read_json
from dflash_serve.common.settings import describe
from dflash_serve.deployment.description import Deployment, Parallel
from dflash_serve.errors import UserError, did_you_mean, raise_problems
from dflash_serve.planning.prediction import (
    FITTED,
    Constants,
    ExpectedAcceptance,
    Load,
    MeasuredCell,
    OperatingPoint,
    Predictor,
    fit,
)
from dflash_serve.planning.step_times import (
    SPECIFICATIONS,
    Pair,
    Specification,
    Split,
    StepTimes,
    priced,
    shipped_configuration,
)

USUAL_LAYERS, USUAL_FEATURES, USUAL_BLOCK = 5, 5, 16
"""Shape of most published DFlash drafters (z-lab)."""
USUAL_KV_HEADS, USUAL_HEAD_DIM = 8, 128
"""Sizes that are assumed where the target has a latent cache (Kimi), and so no K/V heads of its own."""


@dataclass(frozen=True)
class Objective:
    """Limits that a plan must meet; None = no limit."""

    interactivity: float | None = None  # Tokens/s/user at least
    first_token_ms: float | None = None  # TTFT at most

    def is_met(self, point: OperatingPoint) -> bool:
        """True where every limit holds."""
        slow = self.interactivity is not None and point.interactivity < self.interactivity
        late = self.first_token_ms is not None and point.first_token_ms > self.first_token_ms
        return not (slow or late)

    def best(self, points: Iterable[OperatingPoint]) -> OperatingPoint | None:
        """The most tokens/s/GPU of those that meet it; among equals, the more interactive. None = none does."""
        met = [point for point in points if self.is_met(point)]
        return max(met, key=lambda point: (point.throughput, point.interactivity), default=None)

    def require_met(self, points: Sequence[OperatingPoint]) -> None:
        """Names the nearest limit that is met.

        Raises:
            UserError: no point meets it.
        """
        if any(map(self.is_met, points)):
            return
        user, late = self.interactivity, self.first_token_ms
        in_time = [point for point in points if late is None or point.first_token_ms <= late]
        if in_time:
            near = fastest(in_time)
            what, limit = f"no way of running gives {user:g} tokens/s/user", f"interactivity {int(near.interactivity)}"
        else:
            near = min(points, key=lambda point: point.first_token_ms)
            what, limit = (
                f"no way of running has its first token after {late:g} ms",
                f"ttft {ceil(near.first_token_ms)}",
            )
        how = f"--slo-{limit} ({near.variant}, {near.split}, batch {near.batch})"
        raise UserError(what, where="the SLO", do=f"the nearest that is met is {how}; or more GPUs, or another GPU")


def fastest(points: Iterable[OperatingPoint]) -> OperatingPoint:
    """The point that gives one user the most tokens/s."""
    return max(points, key=lambda point: point.interactivity)


@dataclass(frozen=True)
class PlanQuestion:
    """Everything that a plan depends on."""

    deployment: Deployment
    backend: str
    on: Specification
    pair: Pair
    block_size: int
    load: Load
    objective: Objective
    acceptances: tuple[ExpectedAcceptance, ...]  # One, or a band from low to high
    constants: Constants
    calibration: tuple[str, ...] = ()
    """A line for each point that the constants were fitted to; empty = they were not fitted here."""

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return self.deployment.hardware.count

    def copies(self, split: Split) -> int:
        """Copies of the model on all GPUs."""
        return self.count // split.tensor

    def most(self, split: Split) -> int | None:
        """Requests at once on one copy by `limits.max_batch_size`, which all copies share; None = no limit."""
        asked = self.deployment.limits.max_batch_size
        return None if asked is None else asked // self.copies(split)

    def require_lengths(self) -> None:
        """Refuses requests that are longer than target, drafter or `limits.max_model_len` allow.

        Raises:
            UserError: they are; says which.
        """
        shape, drafter, deployment = self.pair.layout.shape, self.pair.drafter, self.deployment
        raise_problems(list(length_problems(deployment, shape)))
        windowed = deployment.speculation.draft_window or any(kind.window for kind in drafter.layers)
        unbounded = windowed or drafter.rope.scaling or self.pair.assumed
        allowed = (
            (shape.max_position_embeddings, f"the positions of {shape.name}"),
            (deployment.limits.max_model_len, "limits.max_model_len"),
            (None if unbounded else drafter.max_position_embeddings, "the positions of the drafter"),
        )
        isl, osl = self.load.isl, self.load.osl
        most, name = min(((most, name) for most, name in allowed if most), default=(isl + osl, ""))
        if isl + osl > most:
            what = f"prompts of {isl} and answers of {osl} tokens exceed {name}, {most}"
            raise UserError(what, where="--isl, --osl", do=f"give {most} together at most")

    def splits(self) -> list[Split]:
        """Ways of laying one copy over GPUs: the one that was asked for, or all that divide.

        Raises:
            UserError: the one that was asked for does not.
        """
        parallel, layout = self.deployment.parallel, self.pair.layout
        for name in ("pipeline", "context", "attention_data", "nodes"):
            if getattr(parallel, name) != Parallel.model_fields[name].default:
                do = "leave it out: a plan has TP, EP and copies alone"
                raise UserError("this is not planned for", where=f"parallel.{name}", do=do)
        sizes = [size for size in (1, 2, 4, 8) if size <= min(self.count, self.on.gpu.per_node)]
        tensors = [size for size in sizes if not list(self._split_problems(size))]
        if "tensor" in parallel.model_fields_set:
            for what in self._split_problems(parallel.tensor):
                possible = " or ".join(map(str, tensors))
                more = "; more GPUs (--count) allow more" if self.count < self.on.gpu.per_node else ""
                raise UserError(what, where="--tensor", do=f"use {possible or 'another'}{more}")
            tensors = [parallel.tensor]
        asked = {parallel.expert} if "expert" in parallel.model_fields_set else None
        found = [
            Split(tensor, expert)
            for tensor in tensors
            for expert in sorted(asked or {1, tensor})
            if expert == 1 or (layout.experts and not layout.experts % expert and not tensor % expert)
            if asked or not list(expert_block_problems(layout, tensor, expert))
        ]
        if not found and asked:
            what = f"EP {parallel.expert} does not divide both TP and {layout.experts} experts"
            raise UserError(what, where="--expert", do="leave it out, or use 1 or as many as TP")
        if not found:
            why = next((what for size in sizes for what in self._split_problems(size)), "none fits a node")
            what = f"no split of {layout.shape.name} over {self.count} GPUs is possible ({why})"
            raise UserError(what, where="--count", do="give another number of GPUs")
        return found

    def step_times(self, split: Split) -> tuple[StepTimes, str | None]:
        """Step times of one copy, and why they are not from operator tables (None: they are)."""
        return priced(self.pair, self.on, split, self.constants.tables, self.block_size, self.load.context)

    def _split_problems(self, tensor: int) -> Iterator[str]:
        if tensor > self.on.gpu.per_node:
            yield f"TP {tensor} is more than the {self.on.gpu.per_node} GPUs of a node"
        if self.count % tensor:
            yield f"TP {tensor} does not divide {self.count} GPU{'s' * (self.count > 1)}"
        parallel, copies = self.deployment.parallel, self.count // tensor
        if "data" in parallel.model_fields_set and copies != parallel.data:
            yield f"TP {tensor} makes {copies} copies on {self.count} GPUs, and parallel.data is {parallel.data}"
        for problem in attention_head_problems(self.pair.layout, self.pair.drafter, tensor):
            yield f"TP {tensor}: {problem.what} ({problem.where})"


def specification(gpu: str | None) -> Specification:
    """The data sheet of a GPU.

    Raises:
        UserError: no GPU was named, or its data sheet is not known.
    """
    have = ", ".join(SPECIFICATIONS)
    if gpu is None:
        raise UserError("which GPU?", where="--gpu", do=f"name one: {have}")
    if (gpu := gpu.lower()) in SPECIFICATIONS:
        return SPECIFICATIONS[gpu]
    what = "a CPU is not planned for" if gpu == "none" else f"nothing is known of a GPU {gpu!r}"
    raise UserError(what, where="--gpu", do=did_you_mean(gpu, SPECIFICATIONS) or f"there are: {have}")


def read_pair(deployment: Deployment) -> Pair:
    """Target and drafter from their configurations; no weights are read. Of known targets the operator tables' library
    has the configuration, for machines without a network.

    Raises:
        UserError: one cannot be had, or they do not fit.
    """
    model = deployment.target
    folder = None if Path(model.model).is_dir() else shipped_configuration(model.model)
    if folder is None:
        folder = target_configuration(model.model_copy(update={"model": str(target_described(model.model))}))
    layout = read_target_layout(folder, model)
    if layout.experts and not layout.experts_per_token:
        what = f"config.json names {layout.experts} experts, and not how many of them a token uses"
        raise UserError(what, where=model.model, do=f"add {KEYS['experts per token'][0]} to it")
    if deployment.drafter is None:
        block = deployment.speculation.block_size or USUAL_BLOCK
        drafter, assumed = usual_drafter(layout, read_target(folder), block)
    else:
        drafter, assumed = read_config(deployment.drafter.model, deployment.drafter.revision)[0], None
        raise_problems([*check_pairing(drafter, layout.shape), *block_problems(deployment, drafter)])
    drafter = drafter.model_copy(update={"block_size": deployment.speculation.block_size or drafter.block_size})
    share = deployment.kv_cache.memory_fraction
    return Pair(model, folder, layout, drafter, assumed, kv_bytes_each(deployment, layout), share)


def usual_drafter(layout: TargetLayout, target: TargetFiles, block_size: int) -> tuple[DrafterConfig, str]:
    """A drafter of the usual shape for this target, and a sentence that says that it is assumed.

    Raises:
        UserError: the target's sizes fit no drafter.
    """
    shape, wide = layout.shape, target.model.get("intermediate_size")
    try:
        config = DrafterConfig(
            block_size=block_size,
            target_layer_ids=uniform_target_layer_ids(shape.num_layers, USUAL_FEATURES),
            mask_token_id=0,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=wide if isinstance(wide, int) and not layout.experts else 3 * shape.hidden_size,
            num_attention_heads=layout.attention_heads,
            num_key_value_heads=USUAL_KV_HEADS if layout.latent else layout.kv_heads,
            head_dim=USUAL_HEAD_DIM if layout.latent else layout.head_dim,
            layers=(AttentionKind(),) * USUAL_LAYERS,
        )
    except ValidationError as error:
        what = f"no drafter has the sizes of this target ({describe(error)})"
        raise UserError(what, where=shape.name, do="correct its config.json, or name --drafter") from None
    words = f"no drafter was named: one of {USUAL_LAYERS} layers as wide as the target, B = {block_size}, is assumed"
    return config, words


PRESETS = "published_acceptance.json"
BAND = (3.0, 4.5, 6.0)  # Acceptance lengths of a whole block that published drafters have, from chat to mathematics
AS_IT_IS = "as it is"  # Name of a drafter with its own features in reports of `evaluate`


def from_length(length: float, block_size: int, source: str, *, measured_at: int | None = None) -> ExpectedAcceptance:
    """Geometric survival p, p^2, ... with 1 + p + ... + p^(M-1) = length, M the block it was measured with.

    Checked on published pairs of widths (16 -> 8; 10 -> 6, 4): within -5 to +3 % in 13 of 13.

    Raises:
        UserError: it is not between 1 and M.
    """
    most = measured_at or block_size
    if not 1 < length < most:
        do = f"tokens gained a step, the bonus token counted: more than 1, less than {most}"
        raise UserError(f"{length:g} is no acceptance length of a block of {most}", where="--acceptance-length", do=do)
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the sum rises with p
        share = (low + high) / 2
        low, high = (share, high) if sum(share**slot for slot in range(most)) < length else (low, share)
    return _expected([low**slot for slot in range(1, block_size)], source)


def band(block_size: int) -> list[ExpectedAcceptance]:
    """A low, middle and high acceptance, for a drafter that has not been measured."""
    source = "nothing is known of this drafter's acceptance: a band, not a prediction"
    return [from_length(min(length, 0.9 * block_size), block_size, source) for length in BAND]


def of_task(task: str, target: str, block_size: int) -> ExpectedAcceptance:
    """A published acceptance length of this target's own drafter.

    Raises:
        UserError: none was published; says which were.
    """
    presets = json.loads((files(__package__) / PRESETS).read_text(encoding="utf-8"))
    name = target.rstrip("/").rpartition("/")[2].lower()
    key = max((each for each in presets if name.startswith(each.lower())), key=len, default=None)
    if key is None:
        what = f"no acceptance was published for {target} (there is: {', '.join(presets)})"
        do = "give --acceptance-length, or --survival a report of `evaluate`"
        raise UserError(what, where=f"--task {task}", do=do)
    row = presets[key]
    if task not in row["tasks"]:
        do = did_you_mean(task, row["tasks"]) or f"there are: {', '.join(row['tasks'])}"
        raise UserError(f"no acceptance was published for this task of {key}", where=f"--task {task}", do=do)
    source = f"published for {key}, {task}, block size {row['block_size']}, greedy ({row['source']})"
    return from_length(row["tasks"][task], block_size, source, measured_at=row["block_size"])


def from_report(path: Path, task: str | None, block_size: int) -> ExpectedAcceptance:
    """Survival measured by `evaluate --output` or by `bench`; slots that were not measured survive as the last one did.

    Raises:
        UserError: it is no such report, has no such task, or tells no survival.
    """
    where = f"--survival {path}"
    report = read_json(path)
    try:
        if "points" in report:
            survival, measured = _of_bench(report["points"]), "bench"
        else:
            measured = _task_of(report["tasks"], task, where)
            survival = report["tasks"][measured][AS_IT_IS]["survival"]
        known = [float(share) for share in survival[: block_size - 1] if share is not None]
    except (KeyError, TypeError, ValueError, AttributeError):
        do = "give the JSON of `evaluate --output` or of `bench`"
        raise UserError("no report", where=where, do=do) from None
    if not known:
        raise UserError("it tells no survival", where=where, do="measure with a fixed width")
    if not all(0 <= share <= 1 for share in known):
        raise UserError("a share of its survival is not from 0 to 1", where=where, do="measure it again")
    conditional = min(1.0, known[-1] / known[-2]) if len(known) > 1 and known[-2] else known[-1]
    while len(known) < block_size - 1:
        known.append(known[-1] * conditional)
    return _expected(known, f"measured: {measured} of {path.name}")


def _expected(survival: Sequence[float], source: str) -> ExpectedAcceptance:
    return ExpectedAcceptance(f"\N{GREEK SMALL LETTER TAU} {1 + sum(survival):.2f}", tuple(survival), source)


def _task_of(tasks: Mapping[str, Any], task: str | None, where: str) -> str:
    name = task or (next(iter(tasks)) if len(tasks) == 1 else None)
    if name is None or name not in tasks:
        do = f"give --task one of: {', '.join(tasks)}"
        raise UserError("which task?" if task is None else f"no task {task!r}", where=where, do=do)
    return name


def _of_bench(points: Sequence[Mapping[str, Any]]) -> Sequence[float]:
    # A fixed width before others; then the point that verified most slots, then the one with most verifications.
    def order(point: Mapping[str, Any]) -> tuple[bool, int, float]:
        acceptance = point["acceptance"]
        return point["variant"].startswith("fixed"), len(acceptance["survival"]), acceptance["verifications"] or 0

    told = [point for point in points if point["acceptance"].get("survival")]
    survival: Sequence[float] = max(told, key=order)["acceptance"]["survival"] if told else ()
    return survival


def calibrated(question: PlanQuestion, path: Path) -> PlanQuestion:
    """The question with its constants fitted to the report of `bench` or `certify`, at the split of the deployment.

    Raises:
        UserError: no report of a bench, of another target, or with too few points.
    """
    where, do = f"--calibrate {path}", "give the bench.json or certificate.json of this pair"
    parallel, asked, start = question.deployment.parallel, question.deployment.target.model, question.constants
    split = Split(parallel.tensor, parallel.expert)
    report = read_json(path)
    try:
        target = report.get("served", {}).get("Target", asked)
        hardware = report.get("environment", {}).get("hardware") or "unknown hardware"
        points = [_measured(point, parallel.data) for point in report["points"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError("no report of `bench`", where=where, do=do) from None
    if target != asked:
        raise UserError(f"it measured {target}, the plan is for {asked}", where=where, do=do)
    predictor = Predictor(question.step_times(split)[0], start, question.load, question.block_size, split)
    cells = [MeasuredCell(predictor, *point) for point in points if not isinstance(point, str)]
    by_kind = {
        "plain": [cell for cell in cells if cell.width == 1],
        "speculative": [cell for cell in cells if cell.width > 1],
    }
    plain, wide = map(len, by_kind.values())
    if plain < 2 or wide == 1:
        what = f"{plain} usable points without speculation and {wide} with: two of a kind are needed"
        raise UserError(what, where=where, do="bench --variants off,fixed at several --concurrency")
    found = fit(cells, start, [name for name in FITTED if by_kind[name.partition("_")[0]]])
    errors = {kind: mean(abs(cell.error(found)) for cell in each) for kind, each in by_kind.items() if each}
    plain_error, error = (
        min(0.9, max(0.02, round(errors[kind], 3))) if kind in errors else start.error for kind in by_kind
    )
    update = {
        "name": f"calibrated-{path.stem}",
        "evidence": "calibrated",
        "source": f"{len(cells)} points of {path.name}, on {hardware}",
        "plain_error": plain_error,
        "error": error,
    }
    lines = [
        f"{cell.label}: measured {cell.rate:,.0f} tokens/s, predicted {cell.predicted(found):,.0f} "
        f"({cell.error(found):+.0%})"
        for cell in cells
    ]
    told = (*lines, *(f"not used: {point}" for point in points if isinstance(point, str)))
    return replace(question, constants=found.model_copy(update=update), calibration=told)


def _measured(point: Mapping[str, Any], copies: int) -> tuple[int, int, float, float, str] | str:
    # Batch, width, tokens a step, tokens/s and label of a bench's point at a fixed width; or why it is not used.
    variant, users = str(point["variant"]), int(point["concurrency"])
    label, word = f"{variant}, {users} user{'s' * (users != 1)}", variant.removeprefix("fixed ")
    width = 1 if variant == "off" else int(word) if word.isdecimal() else 0
    if not width:
        return f"{label} (its width changes)"
    seen = float(point["interactivity"] or 0)
    tokens = 1.0 if width == 1 else float(point["acceptance"]["acceptance_length"] or 0)
    if not (0 < seen < inf and 1 <= tokens < inf):
        return f"{label} (its speed or acceptance is unknown)"
    batch = max(1, round(users / copies))
    return batch, width, tokens, batch * seen, label

"""Constants of an engine from a measurement of the user's: `plan --calibrate`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from dflash_serve.adapter.registry import backend
from dflash_serve.common.documents import read_json
from dflash_serve.deployment.gpus import GPUS, named_by
from dflash_serve.errors import UserError
from dflash_serve.planning.prediction import FITTED, MeasuredCell, Predictor, fit
from dflash_serve.planning.question import PlanQuestion
from dflash_serve.planning.step_times import Split

FAR = 0.3  # Mean relative error of a fit from which a report without a GPU is taken for another's


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
        hardware = str(report.get("environment", {}).get("hardware") or "unknown hardware")
        engine = re.search("engine: (.+)", str(report.get("served", {}).get("Variants")))
        points = [_measured(point, parallel.data) for point in report["points"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError("no report of `bench`", where=where, do=do) from None
    if target != asked:
        raise UserError(f"it measured {target}, the plan is for {asked}", where=where, do=do)
    measured_on = _gpu_of(hardware)
    if measured_on not in (None, question.on.name):
        raise UserError(f"it was measured on {hardware}, the plan is for {question.on.name}", where=where, do=do)
    title = backend(question.backend).facts.title
    if engine is not None and engine[1] != "unknown" and not engine[1].startswith(title):
        raise UserError(f"it measured {engine[1]}, the plan is for {title}", where=where, do=do)
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
    if measured_on is None and (worst := max(errors.values())) > FAR:
        what = f"it does not tell its GPU, and no constants come nearer to its points than {worst:.0%} on average"
        raise UserError(what, where=where, do=f"give a report of a {question.on.name}, of this load and this engine")
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


def _gpu_of(hardware: str) -> str | None:
    # The kind of GPU of a report; `none` for a CPU, None where it is not told.
    if "cores of" in hardware:
        return "none"
    words = f"-{re.sub('[^a-z0-9]+', '-', hardware.lower())}-"
    known = named_by(hardware)
    return known.name if known else next((name for name in GPUS if f"-{name}-" in words), None)


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

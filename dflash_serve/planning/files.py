"""The files of a plan: all figures as JSON, the deployment, its cost table, and constants that were fitted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.common.provenance import commit, now, versions
from dflash_serve.common.reports import json_text, write_files
from dflash_serve.errors import UserError
from dflash_serve.planning.methods import METHODS, PricedMethod, batches
from dflash_serve.planning.plan import COSTS, DEPLOYMENT, Plan, points_of
from dflash_serve.planning.prediction import OperatingPoint
from dflash_serve.planning.search import widths

JSON, CONSTANTS = "plan.json", "constants.json"


def row(plan: Plan, point: OperatingPoint) -> dict[str, Any]:
    """One operating point as JSON: settings, figures with bounds, and the provenance of its step time."""
    error = plan.error(point)
    return {
        "variant": point.variant,
        "tensor": point.split.tensor,
        "expert": point.split.expert,
        "batch": point.batch,
        "width": point.width,
        "acceptance_length": round(point.acceptance_length, 3),
        "tokens_per_s_per_gpu": round(point.throughput, 2),
        "lowest": round(point.throughput * (1 - error), 2),
        "highest": round(point.throughput * (1 + error), 2),
        "tokens_per_s_per_user": round(point.interactivity, 3),
        "first_token_ms": round(point.first_token_ms, 2),
        "step_ms": round(point.step.total, 4),
        **{f"share_{name}": round(share, 4) for name, share in point.step.shares().items()},
    }


def _method(plan: Plan, method: PricedMethod) -> dict[str, Any]:
    points = [
        row(plan, point) | {"times_off": round(gain, 3)}
        for point, gain in zip(method.points, method.gains, strict=True)
    ]
    source = None if method.acceptance is None else method.acceptance.source
    told = {"method": method.name, "drafter": method.drafter, "acceptance": source, "why_not": method.why_not}
    return {**told, "points": points}


def as_json(plan: Plan, methods: Sequence[PricedMethod] = ()) -> dict[str, Any]:
    """All figures, for programs."""
    asked, (low, high) = plan.question, plan.range
    return {
        "verdict": plan.verdict(),
        "cautions": list(plan.cautions()),
        "question": {
            "target": asked.pair.layout.shape.name,
            "drafter": asked.deployment.drafter.model if asked.deployment.drafter else None,
            "block_size": asked.block_size,
            "backend": asked.backend,
            "gpu": asked.on.name,
            "count": asked.count,
            "isl": asked.load.isl,
            "osl": asked.load.osl,
            "slo_interactivity": asked.objective.interactivity,
            "slo_ttft_ms": asked.objective.first_token_ms,
        },
        "chosen": row(plan, plan.chosen) | {"lowest": low, "highest": high},
        "plain": plan.plain and row(plan, plan.plain),
        "plain_fastest": row(plan, plan.plain_fastest),
        "equal_batch_gain": plan.equal_batch_gain,
        "equal_interactivity_ratio": plan.equal_interactivity_ratio,
        "fixed_width_stops_paying_at": plan.stops_at,
        "requests_that_fit": {str(split): room._asdict() for split, room in plan.room.items()},
        "basis": plan.basis,
        "constants": asked.constants.model_dump(),
        "calibration": asked.calibration or None,
        "acceptances": [asdict(each) for each in asked.acceptances],
        "methods": [_method(plan, each) for each in methods] or None,
        "environment": {"versions": versions("dflash-serve", "aiconfigurator-core"), "commit": commit(), "date": now()},
        "points": [
            {"acceptance": acceptance.name} | row(plan, point)
            for acceptance, curves in zip(asked.acceptances, plan.curves, strict=True)
            for point in points_of(curves)
        ],
    }


def require_free(folder: Path) -> None:
    """Refuses a folder that has a plan: its deployment may have been edited since.

    Raises:
        UserError: it has one.
    """
    if any((folder / name).exists() for name in (JSON, DEPLOYMENT)):
        raise UserError("it has a plan", where=f"--output {folder}", do="give another folder, or --overwrite")


def methods_steps(plan: Plan, folder: Path, methods: Sequence[PricedMethod]) -> Iterator[str]:
    """The command that measures the methods on the engine; nothing where no other method was priced."""
    others = [each for each in methods if each.overlay is not None]
    if plan.deployment is None or plan.deployment.pair is not None or not others:
        return
    loads = ",".join(str(batch * plan.copies_in_one_server) for batch in batches(plan))
    words = ["dflash-serve", "bench", f"{folder}/{DEPLOYMENT}", "--backend", plan.question.backend]
    words += ["--variants", "off,fixed"]
    words += [word for each in others for word in ("--variant", f"{each.name}={folder}/{each.name}.yaml")]
    words += ["--concurrency", loads, "--max-tokens", str(plan.question.load.osl), "--output", f"{folder}/methods"]
    unnamed = any("${HEAD}" in str(each.overlay) for each in others)
    yield ("HEAD=ORG/HEAD " if unnamed else "") + shlex.join(words)


def write_plan(plan: Plan, folder: Path, methods: Sequence[PricedMethod] = ()) -> list[Path]:
    """Writes every file, each whole or not at all, and returns their paths.

    Raises:
        UserError: one cannot be written.
    """
    costs = plan.predictors[plan.chosen.split].cost_model(plan.chosen.batch, widths(plan.question.block_size))
    contents = {
        JSON: json_text(as_json(plan, methods)),
        COSTS: json_text(costs),
    }
    if plan.deployment is not None:
        told, servers = plan.verdict(), plan.copies // plan.copies_in_one_server
        if plan.deployment.pair is not None and plan.halves is not None:
            prefill, decode = plan.halves
            told.append(
                f"This is a pair: `dflash-serve deploy` starts {prefill} servers that prefill, {decode} that decode."
            )
        elif servers > 1:
            told.append(
                f"This is one of {servers} servers alike, each with at most {plan.deployment.limits.max_batch_size} "
                f"requests at once. Set `replicas: {servers}` in the values that `dflash-serve deploy` writes."
            )
        elif plan.copies > 1:
            told.append("limits.max_batch_size is the number of requests at once on all copies together.")
        fields = plan.deployment.model_dump(mode="json", exclude_defaults=True)
        contents[DEPLOYMENT] = "".join(f"# {line}\n" for line in told) + yaml.safe_dump(fields, sort_keys=False)
        for each in methods:
            if each.overlay is not None:
                contents[f"{each.name}.yaml"] = yaml.safe_dump(dict(each.overlay), sort_keys=False)
    if plan.question.calibration:
        contents[CONSTANTS] = json_text(plan.question.constants)
    ours = {DEPLOYMENT, CONSTANTS, *(f"{each}.yaml" for each in METHODS)}
    for name in ours - {*contents}:  # of a plan that is replaced; not every plan has them
        (folder / name).unlink(missing_ok=True)
    return write_files(folder, contents)

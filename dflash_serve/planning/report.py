"""A plan's files: JSON and CSV with the provenance of every figure, picture, Deployment, cost table, HTML."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_serve.bench.pareto import colours
from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import commit, now, versions
from dflash_serve.planning import handover
from dflash_serve.planning.calibration import Calibration
from dflash_serve.planning.constants import as_json as constants_json
from dflash_serve.planning.picture import draw
from dflash_serve.planning.plan import Plan
from dflash_serve.planning.prediction import OperatingPoint
from dflash_serve.planning.search import front

JSON, CSV, HTML, PARETO, CONSTANTS = "plan.json", "plan.csv", "report.html", "pareto.png", "constants.json"
TEMPLATE = "plan.html.jinja"


def row(plan: Plan, point: OperatingPoint) -> dict[str, Any]:
    """One line of the tables: what is run, what it gives, between what bounds, and whence."""
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
        **{f"share_{name}": round(share, 4) for name, share in _all_shares(point).items()},
    }


def _all_shares(point: OperatingPoint) -> dict[str, float]:
    return {"measured": 0.0, "interpolated": 0.0, "roofline": 0.0, "constants": 0.0} | point.step.shares()


def as_json(plan: Plan, calibration: Calibration | None = None) -> dict[str, Any]:
    """All figures, for programs."""
    asked, low_high = plan.question, plan.range
    shape = asked.pair.layout.shape
    return {
        "verdict": plan.verdict(),
        "cautions": [*plan.cautions(), *_refused(plan)],
        "question": {
            "target": shape.name,
            "drafter": asked.deployment.drafter.model if asked.deployment.drafter else None,
            "block_size": asked.block_size,
            "backend": asked.backend,
            "gpu": asked.on.gpu.name,
            "count": asked.count,
            "isl": asked.load.isl,
            "osl": asked.load.osl,
            "slo_interactivity": asked.objective.interactivity,
            "slo_ttft_ms": asked.objective.first_token_ms,
        },
        "chosen": row(plan, plan.chosen) | {"lowest": low_high[0], "highest": low_high[1]},
        "plain": plan.plain and row(plan, plan.plain),
        "plain_fastest": row(plan, plan.plain_fastest),
        "equal_batch_gain": plan.equal_batch_gain,
        "equal_interactivity_ratio": plan.equal_interactivity_ratio,
        "fixed_width_stops_paying_at": plan.stops_at,
        "requests_that_fit": {str(split): room for split, room in plan.found.room.items()},
        "basis": plan.found.basis,
        "constants": asked.constants.model_dump(),
        "calibration": calibration and calibration.lines(),
        "acceptances": [
            {"name": each.name, "survival": each.survival, "source": each.source} for each in asked.acceptances
        ],
        "environment": {"versions": versions("dflash-serve", "aiconfigurator-core"), "commit": commit(), "date": now()},
        "points": [
            {"acceptance": acceptance.name} | row(plan, point)
            for acceptance, curves in zip(asked.acceptances, plan.found.curves, strict=True)
            for points in curves.values()
            for point in points
        ],
    }


def _refused(plan: Plan) -> list[str]:
    return [f"`serve` would refuse the deployment here: {problem}." for problem in handover.refusals(plan)]


def as_csv(lines: Sequence[dict[str, Any]]) -> str:
    """A line for each point."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def fronts(plan: Plan) -> dict[str, list[OperatingPoint]]:
    """The best of each variant, by rising interactivity."""
    return {name: front(points)[::-1] for name, points in plan.curves.items()}


def write_plan(plan: Plan, folder: Path, *, html: bool, calibration: Calibration | None = None) -> list[Path]:
    """Writes every file, each whole or not at all, and returns their paths.

    Raises:
        UserError: one cannot be written.
    """
    told = as_json(plan, calibration)
    png, svg = draw(plan)
    contents: dict[str, str | bytes] = {
        JSON: json.dumps(told, indent=1, ensure_ascii=False) + "\n",
        CSV: as_csv(told["points"]),
        PARETO: png,
        handover.COSTS: plan.cost_model.model_dump_json(indent=1) + "\n",
    }
    deployment = handover.deployment_of(plan)
    if deployment is not None:
        contents[handover.DEPLOYMENT] = handover.as_yaml(deployment, plan)
    if calibration is not None:
        contents[CONSTANTS] = constants_json(calibration.constants)
    if html:
        contents[HTML] = as_html(plan, told, svg, folder)
    for name, content in contents.items():
        write_whole(folder / name, content, do="name another --output")
    return [folder / name for name in contents]


def as_html(plan: Plan, told: dict[str, Any], plot: bytes, folder: Path) -> str:
    """One HTML document that needs no network, in the style of bench's report."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    deployment = handover.deployment_of(plan)
    return jinja.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8")).render(
        plan=plan,
        told=told,
        fronts={name: [row(plan, point) for point in points] for name, points in fronts(plan).items()},
        colours=colours(plan.curves),
        style=(files("dflash_serve.bench") / "report.css").read_text(encoding="utf-8"),
        plot=base64.b64encode(plot).decode("ascii"),
        yaml=None if deployment is None else handover.as_yaml(deployment, plan),
        steps=list(handover.next_steps(plan, folder.name)),
    )

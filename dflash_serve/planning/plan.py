"""The answer of `dflash-serve plan`: the chosen way of running, its figures and errors, and the files of a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.backend import backend, server_backend
from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import commit, now, versions
from dflash_serve.common.settings import overlay
from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem, UserError
from dflash_serve.planning.prediction import Calibration, OperatingPoint
from dflash_serve.planning.question import PlanQuestion
from dflash_serve.planning.search import (
    AUTO,
    OFF,
    Exploration,
    best,
    explore,
    fastest,
    fixed,
    front,
    require_met,
    stops_paying,
)
from dflash_serve.planning.step_times import constants_json
from dflash_serve.speculation.costs import CostModel

JSON, DEPLOYMENT, COSTS, CONSTANTS = "plan.json", "deployment.yaml", "costs.json", "constants.json"
ALIKE = 0.99
ROOFLINE_ERROR = 0.3
"""Mean relative error where the roofline prices, with constants that were fitted with the tables (plan-published.json:
28 % of plain tokens/s, 16 % of speed-ups).
"""


@dataclass(frozen=True)
class Plan:
    """The answer to a question, derived from all points that were priced."""

    found: Exploration

    @property
    def question(self) -> PlanQuestion:
        return self.found.question

    @property
    def _middle(self) -> int:
        return len(self.question.acceptances) // 2

    @cached_property
    def curves(self) -> dict[str, list[OperatingPoint]]:
        """Points at the known acceptance, or at the middle of the band."""
        return self.found.curves[self._middle]

    @cached_property
    def chosen(self) -> OperatingPoint:
        """The most tokens/s/GPU within the limits. `auto` is preferred up to 1 %: it follows the load."""
        objective = self.question.objective
        found = best((point for each in self.curves.values() for point in each), objective)
        follows = best(self.curves.get(AUTO, ()), objective)
        if found is not None and follows is not None and follows.throughput >= ALIKE * found.throughput:
            return follows
        return found or next(point for point in map(self._best_at, reversed(range(len(self.found.curves)))) if point)

    def _best_at(self, place: int) -> OperatingPoint | None:
        return best((point for each in self.found.curves[place].values() for point in each), self.question.objective)

    @cached_property
    def plain(self) -> OperatingPoint | None:
        """The best without speculation within the same limits; None = it does not reach them."""
        return best(self.curves[OFF], self.question.objective)

    @cached_property
    def plain_fastest(self) -> OperatingPoint:
        """The point of plain decoding with the most tokens/s/user."""
        return fastest(self.curves[OFF])

    @cached_property
    def plain_beside(self) -> OperatingPoint:
        """Without speculation at the chosen split and batch."""
        chosen = self.chosen
        return next(each for each in self.curves[OFF] if (each.split, each.batch) == (chosen.split, chosen.batch))

    @property
    def equal_batch_gain(self) -> float:
        return self.chosen.throughput / self.plain_beside.throughput

    @property
    def equal_interactivity_ratio(self) -> float | None:
        """Tokens/s/GPU by plain decoding's, both within the limits; None = plain decoding does not reach them."""
        return None if self.plain is None else self.chosen.throughput / self.plain.throughput

    @property
    def stops_at(self) -> int | None:
        """Number of requests from which the fixed width is slower than plain decoding, at the chosen split."""
        points = self.curves[fixed(self.question.block_size)]
        return stops_paying(points, self.curves[OFF], self.chosen.split)

    def error(self, point: OperatingPoint) -> float:
        """Relative error of its tokens/s: the mean error of such figures against published measurements."""
        constants = self.question.constants
        own = constants.plain_error if point.width == 1 else constants.error
        by_hand = point.step.roofline > 0 and point.step.measured == 0
        return max(own, ROOFLINE_ERROR) if by_hand else own

    @cached_property
    def range(self) -> tuple[float, float]:
        """Tokens/s/GPU, lowest and highest: the error, and the band of acceptances where that is not known."""
        within = [point for place in range(len(self.found.curves)) if (point := self._best_at(place))]
        low, high = (f(within, key=lambda point: point.throughput) for f in (min, max))
        return low.throughput * (1 - self.error(low)), high.throughput * (1 + self.error(high))

    @property
    def copies(self) -> int:
        """Copies of the model on all GPUs."""
        return self.question.count // self.chosen.split.tensor

    @property
    def cost_model(self) -> CostModel:
        """The cost table that `width: auto` starts from."""
        return self.found.predictors[self.chosen.split].cost_model(self.chosen.batch, self.found.widths)

    def verdict(self) -> list[str]:
        """Three lines."""
        return [self._what(), self._gives(), self._trust()]

    def _what(self) -> str:
        chosen, asked = self.chosen, self.question
        width = "without speculation" if chosen.variant == OFF else f"width {chosen.variant.removeprefix('fixed ')}"
        wide = f" (about {chosen.width} at full load)" if chosen.variant == "auto" else ""
        copies = f", {self.copies} copies on {asked.count} GPUs" if self.copies > 1 else ""
        return (
            f"Run {asked.pair.layout.shape.name} on {asked.on.gpu.name.upper()} with {chosen.split}{copies}, "
            f"{width}{wide}, at most {chosen.batch} request{'s' * (chosen.batch > 1)} at once a copy."
        )

    def _gives(self) -> str:
        chosen, (low, high) = self.chosen, self.range
        told = (
            f"Expect {chosen.throughput:,.0f} tokens/s/GPU ({low:,.0f} to {high:,.0f}) at {chosen.interactivity:,.0f} "
            f"tokens/s/user, first token after {chosen.first_token_ms:,.0f} ms"
        )
        if chosen.variant == OFF:
            return f"{told}; speculation does not pay here."
        gain = f"{self.equal_batch_gain:.2f} times as fast as plain decoding at equal batch"
        plain, ratio, end = self.plain, self.equal_interactivity_ratio, self.plain_fastest
        if plain is None or ratio is None:
            return (
                f"{told}; {gain}. Plain decoding does not get there: it ends at {end.interactivity:,.0f} tokens/s/user "
                f"({end.split}, batch {end.batch})."
            )
        return (
            f"{told}; {gain}, {ratio:.2f} times within the same limits (plain: {plain.throughput:,.0f} at "
            f"{plain.split}, batch {plain.batch}; its fastest point is {end.interactivity:,.0f} tokens/s/user, "
            f"{end.split}, batch {end.batch})."
        )

    def _trust(self) -> str:
        stop, block = self.stops_at, self.question.block_size
        pays = f"A fixed width of {block} stops paying at {stop} requests" if stop else (
            f"A fixed width of {block} pays at every batch that fits"
        )  # fmt: skip
        parts = ", ".join(f"{share:.0%} {name}" for name, share in self.chosen.step.shares().items())
        return (
            f"{pays}. Nothing was run: {self.found.basis}; engine constants {self.question.constants.name} ({parts})."
        )

    def cautions(self) -> list[str]:
        """Limits and assumptions of this plan, one sentence each."""
        return list(self._cautions())

    def _cautions(self) -> Iterator[str]:
        asked, layout, constants = self.question, self.question.pair.layout, self.question.constants
        yield from (f"Roofline: {note}." if "operator tables" in note else f"{note}." for note in self.found.notes)
        if asked.pair.assumed:
            yield f"{asked.pair.assumed[0].upper()}{asked.pair.assumed[1:]}."
        if len(asked.acceptances) > 1:
            taus = ", ".join(each.name for each in asked.acceptances)
            yield f"{asked.acceptances[0].source[0].upper()}{asked.acceptances[0].source[1:]} ({taus})."
        if constants.evidence in ("implied", "assumed"):
            told = f"The engine constants are {constants.evidence}: {constants.source}."
            yield f"{told} Measure with `bench`, then --calibrate."
        if layout.experts:
            missed = "; on Hopper, published gpt-oss-120b cells were missed by -35 to +35 %"
            where = "" if asked.on.gpu.is_blackwell else missed
            yield f"Experts are taken as chosen independently by every slot of a block{where}."
        if not self.found.can_follow:
            yield f"{asked.backend} cannot run `width: auto` for this pair: only fixed widths and off were compared."
        ratio = self.equal_interactivity_ratio
        if ratio is not None and ratio > 3 * self.equal_batch_gain:
            yield (
                f"The ratio of {ratio:.1f} is where plain decoding runs out of speed, not a speed-up: 5 % in its "
                "fastest point move it by half. The gain at equal batch is what speculation does."
            )
        yield (
            f"Prompts of {asked.load.isl} and answers of {asked.load.osl} tokens are means; nothing waits in a queue, "
            "and limits hold for means, not for tails."
        )


def make_plan(question: PlanQuestion, *, can_follow: bool = True) -> Plan:
    """Answers a question.

    Raises:
        UserError: nothing fits, or nothing meets the limits.
    """
    found = explore(question, can_follow=can_follow)
    require_met(found, question.objective)
    return Plan(found)


def copies_in_one_server(plan: Plan) -> int:
    """Copies of the model in one server. All other copies are replicas of that server."""
    return plan.copies if backend(plan.question.backend).facts.data_parallel else 1


def deployment_of(plan: Plan) -> Deployment | None:
    """The given deployment with the chosen split, width and limits; None = no drafter was named."""
    asked, chosen = plan.question.deployment, plan.chosen
    if asked.drafter is None:
        return None
    copies = copies_in_one_server(plan)
    width: int | str = chosen.width if chosen.variant.startswith("fixed") else chosen.variant
    update: dict[str, Any] = {
        "speculation": {"width": width},
        "parallel": {"tensor": chosen.split.tensor, "expert": chosen.split.expert, "data": copies},
        "limits": {"max_batch_size": chosen.batch * copies},
        "hardware": {"count": chosen.split.tensor * copies},
    }
    return Deployment.model_validate(overlay(asked.model_dump(exclude_unset=True), update))


def as_yaml(deployment: Deployment, plan: Plan) -> str:
    """YAML for `serve`; defaults are left out."""
    told = "".join(f"# {line}\n" for line in plan.verdict())
    replicas = plan.copies - copies_in_one_server(plan)
    told += f"# One of {plan.copies} servers alike: `dflash-serve deploy` makes replicas.\n" if replicas else ""
    return told + yaml.safe_dump(deployment.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def refusals(plan: Plan) -> list[Problem]:
    """Problems that the engine's checks find in the Deployment."""
    deployment = deployment_of(plan)
    if deployment is None:
        return []
    try:
        return server_backend(plan.question.backend).check(deployment)
    except UserError as error:
        return [Problem(error.what, error.where, error.do)]


def can_follow(backend_name: str, deployment: Deployment) -> bool:
    """True where the engine can run `width: auto` for this pair."""
    if deployment.drafter is None:
        return True
    automatic = Deployment.model_validate(
        overlay(deployment.model_dump(exclude_unset=True), {"speculation": {"width": "auto"}})
    )
    try:
        problems = server_backend(backend_name).check(automatic)
    except UserError:
        return True
    return not any(problem.where == "speculation.width" for problem in problems)


def bench_command(plan: Plan, folder: str) -> str:
    """The command that measures the planned deployment; `--calibrate` reads its report."""
    chosen, asked = plan.chosen, plan.question
    loads = sorted({1, *(max(1, chosen.batch >> shift) for shift in range(0, 7, 2))})
    variants = "off,fixed" + (",auto" if chosen.variant == "auto" else "")
    words = [
        *("dflash-serve", "bench", f"{folder}/{DEPLOYMENT}", "--backend", asked.backend, "--variants", variants),
        *("--concurrency", ",".join(str(load * copies_in_one_server(plan)) for load in loads)),
        *("--max-tokens", str(asked.load.osl), "--output", f"{folder}/bench"),
    ]
    return shlex.join(words)


def next_steps(plan: Plan, folder: str) -> Iterator[str]:
    """Commands, in order."""
    if plan.question.deployment.drafter is None:
        yield "name --drafter, and a deployment.yaml is written"
        return
    environment = "" if plan.chosen.variant == OFF else f"DFLASH_SERVE_COST_TABLE={folder}/{COSTS} "
    yield f"{environment}dflash-serve serve {folder}/{DEPLOYMENT} --backend {plan.question.backend}"
    yield bench_command(plan, folder)
    again = f"dflash-serve plan {folder}/{DEPLOYMENT} --backend {plan.question.backend}"
    yield f"{again} --calibrate {folder}/bench/bench.json"


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
    return [f"`serve` would refuse the deployment here: {problem}." for problem in refusals(plan)]


def fronts(plan: Plan) -> dict[str, list[OperatingPoint]]:
    """The Pareto front of each variant, by rising interactivity."""
    return {name: front(points)[::-1] for name, points in plan.curves.items()}


def write_plan(plan: Plan, folder: Path, calibration: Calibration | None = None) -> list[Path]:
    """Writes every file, each whole or not at all, and returns their paths.

    Raises:
        UserError: one cannot be written.
    """
    told = as_json(plan, calibration)
    contents: dict[str, str] = {
        JSON: json.dumps(told, indent=1, ensure_ascii=False) + "\n",
        COSTS: plan.cost_model.model_dump_json(indent=1) + "\n",
    }
    deployment = deployment_of(plan)
    if deployment is not None:
        contents[DEPLOYMENT] = as_yaml(deployment, plan)
    if calibration is not None:
        contents[CONSTANTS] = constants_json(calibration.constants)
    for name, content in contents.items():
        write_whole(folder / name, content, do="name another --output")
    return [folder / name for name in contents]

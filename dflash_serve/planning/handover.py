"""What a plan hands on: the Deployment that `serve` takes as it is, and the `bench` that would check it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from dflash_serve.backend import backend, server_backend
from dflash_serve.common.settings import overlay
from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem, UserError
from dflash_serve.planning.plan import Plan
from dflash_serve.planning.search import OFF

DEPLOYMENT, COSTS = "deployment.yaml", "costs.json"


def copies_in_one_server(plan: Plan) -> int:
    """Copies that one server runs; the rest are replicas."""
    return plan.copies if backend(plan.question.backend).facts.data_parallel else 1


def deployment_of(plan: Plan) -> Deployment | None:
    """The chosen way as a Deployment, on top of what was asked; None = no drafter was named, so it would be half."""
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
    """A file for `serve`, its defaults left out."""
    told = "".join(f"# {line}\n" for line in plan.verdict())
    rest = plan.copies - copies_in_one_server(plan)
    told += f"# One of {plan.copies} servers alike: `dflash-serve deploy` makes replicas.\n" if rest else ""
    return told + yaml.safe_dump(deployment.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def refusals(plan: Plan) -> list[Problem]:
    """What the engine's own checks say of the Deployment."""
    deployment = deployment_of(plan)
    if deployment is None:
        return []
    try:
        return server_backend(plan.question.backend).check(deployment)
    except UserError as error:
        return [Problem(error.what, error.where, error.do)]


def can_follow(backend_name: str, deployment: Deployment) -> bool:
    """Whether the engine takes `width: auto` for this pair."""
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
    """The command that would check the plan, and whose report `--calibrate` reads."""
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

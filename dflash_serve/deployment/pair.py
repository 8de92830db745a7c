"""The two halves of a `Deployment.pair`: each is a deployment of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from dflash_serve.common.settings import overlay
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError

Role = Literal["prefill", "decode"]
HALVES: tuple[Role, Role] = ("prefill", "decode")


def half_of(deployment: Deployment, role: Role) -> Deployment:
    """The servers of one half: its GPUs, nodes and arguments in the place of the deployment's own.

    Raises:
        UserError: its GPUs cannot be had by another `parallel.tensor`.
    """
    if deployment.pair is None:
        return deployment.model_copy(update={"role": role})
    half, parallel, count = getattr(deployment.pair, role), deployment.parallel, deployment.hardware.count
    gpus = half.gpus or count
    tensor, rest = divmod(parallel.tensor * gpus, count)
    if rest or not tensor:
        what = f"{gpus} GPUs, where {count} (hardware.count) are {parallel.tensor} of parallel.tensor"
        do = "use a number with which parallel.tensor stays whole"
        raise UserError(what, where=f"pair.{role}.gpus", do=do)
    # Whole experts on every device stay so.
    expert = tensor if parallel.expert == parallel.tensor > 1 else parallel.expert
    shape = {"tensor": tensor, "expert": expert, "nodes": half.nodes or parallel.nodes}
    return deployment.model_copy(
        update={
            "role": role,
            "parallel": parallel.model_copy(update=shape),
            "hardware": deployment.hardware.model_copy(update={"count": gpus}),
            "engine_args": _with_own(deployment, half.engine_args),
        }
    )


def _with_own(deployment: Deployment, own: dict[str, dict[str, JsonValue]]) -> dict[str, dict[str, JsonValue]]:
    """The deployment's arguments and a half's, which win in whatever spelling they are."""
    found = dict(deployment.engine_args)
    for backend, arguments in own.items():
        names = {name.replace("_", "-") for name in arguments}
        kept = {name: value for name, value in found.get(backend, {}).items() if name.replace("_", "-") not in names}
        found[backend] = overlay(kept, arguments)
    return found


def both_halves(deployment: Deployment) -> tuple[Deployment, ...]:
    """A pair's deployment in both roles, prefill first; as it is where it is no pair, or one half already."""
    if deployment.pair is None or deployment.role != "whole":
        return (deployment,)
    return tuple(deployment.model_copy(update={"role": role}) for role in HALVES)

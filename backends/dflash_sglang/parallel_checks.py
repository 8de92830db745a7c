"""Heads, experts and devices: what cannot be divided as a Deployment asks."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.errors import Problem

from .plan import Plan
from .release import DATA_PARALLEL_ATTENTION, installed, parse


def parallel_problems(plan: Plan) -> Iterator[Problem]:
    """What SGLang would refuse, or die of, while it starts."""
    yield from _devices(plan)
    yield from _experts(plan)
    yield from _unsupported(plan)
    if not plan.deployment.parallel.attention_data:
        yield from _heads(plan)


def _devices(plan: Plan) -> Iterator[Problem]:
    parallel, hardware = plan.deployment.parallel, plan.deployment.hardware
    if parallel.tensor != hardware.count:
        what = f"tensor parallelism over {parallel.tensor} devices, but hardware.count is {hardware.count}"
        do = f"set parallel.tensor to {hardware.count}, or hardware.count to {parallel.tensor}"
        yield Problem(what, "parallel.tensor", do)
    if parallel.tensor % parallel.nodes:
        what = f"{parallel.tensor} devices cannot be shared evenly by {parallel.nodes} nodes"
        yield Problem(what, "parallel.nodes", "use a number of nodes that divides parallel.tensor")
    if hardware.gpu == "none":
        what = "SGLang's DFlash runs on GPUs (CUDA) only"
        yield Problem(what, "hardware.gpu", "use the torch backend on a CPU")


def _experts(plan: Plan) -> Iterator[Problem]:
    parallel, experts = plan.deployment.parallel, plan.target.experts
    if parallel.expert == 1:
        return
    if not experts:
        yield Problem("the target has no experts", "parallel.expert", "set it to 1")
    elif parallel.expert != parallel.tensor:
        what = f"expert parallelism {parallel.expert} is not tensor parallelism {parallel.tensor}"
        do = f"SGLang shares experts among all tensor-parallel devices: use {parallel.tensor} or 1"
        yield Problem(what, "parallel.expert", do)
    elif experts % parallel.expert:
        what = f"{experts} experts cannot be shared evenly by {parallel.expert} devices"
        yield Problem(what, "parallel.expert", "use a divisor")


def _unsupported(plan: Plan) -> Iterator[Problem]:
    parallel, speculates = plan.deployment.parallel, plan.checkpoint is not None
    if parallel.pipeline > 1 and speculates:
        what = "SGLang's DFlash does not run with pipeline parallelism"
        yield Problem(what, "parallel.pipeline", "set it to 1 and raise parallel.tensor")
    if parallel.context > 1:
        what = "context parallelism is not covered by this backend"
        yield Problem(what, "parallel.context", "set it to 1, or use the tensorrt-llm backend")
    release = parse(installed() or "")
    if parallel.attention_data and speculates and release is not None and release < DATA_PARALLEL_ATTENTION:
        first = ".".join(map(str, DATA_PARALLEL_ATTENTION))
        what = f"data-parallel attention with DFlash needs SGLang {first}"
        yield Problem(what, "parallel.attention_data", f"pip install sglang=={first}")
    if parallel.attention_data and plan.algorithm == "DFLASH_SERVE":
        what = "with data-parallel attention every device must take the same width, which only a fixed one does"
        yield Problem(what, "speculation.width", f"set it to {plan.block_size}")


def _heads(plan: Plan) -> Iterator[Problem]:
    """Heads are split; K/V heads are split, or repeated where there are more devices than heads."""
    tensor = plan.deployment.parallel.tensor
    shapes = [("target.model", plan.target.attention_heads, 1 if plan.target.latent else plan.target.kv_heads)]
    if plan.drafter is not None:
        shapes.append(("drafter.model", plan.drafter.num_attention_heads, plan.drafter.num_key_value_heads))
    for where, heads, kv_heads in shapes:
        if heads % tensor:
            what = f"{heads} attention heads cannot be split over {tensor} devices"
            yield Problem(what, where, "use a number of devices that divides them")
        elif max(kv_heads, tensor) % min(kv_heads, tensor):
            what = f"{kv_heads} K/V heads can be neither split over {tensor} devices nor repeated evenly"
            yield Problem(what, where, "use a divisor or a multiple of them")

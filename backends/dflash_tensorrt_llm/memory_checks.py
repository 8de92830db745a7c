"""Does it fit? Lengths, rows a step, and the drafter's context arena, in bytes, with the limit to lower."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.deployment_checks import length_problems
from dflash_serve.errors import Problem
from dflash_serve.gpus import GIB, Gpu

from .memory import after_weights, arena_budget
from .plan import Plan


def memory_problems(plan: Plan) -> Iterator[Problem]:
    """Problems of size; those of the arena only where the GPU is named."""
    yield from _lengths(plan)
    yield from _rows(plan)
    if plan.gpu is not None:
        free = after_weights(plan.gpu, plan.weight_bytes)
        if free <= 0:
            yield _weights(plan, plan.gpu)
        elif plan.drafter is not None:
            yield from _arena(plan, plan.gpu)


def _lengths(plan: Plan) -> Iterator[Problem]:
    yield from length_problems(plan.deployment, plan.target.shape)
    if plan.drafter is not None and plan.max_model_len > plan.drafter.max_position_embeddings:
        covered = plan.drafter.max_position_embeddings
        what = f"the drafter covers {covered} positions of {plan.max_model_len}; longer requests would draft nothing"
        yield Problem(what, "limits.max_model_len", f"set it to {covered}, or use a drafter trained for more")


def _rows(plan: Plan) -> Iterator[Problem]:
    asked, batch = plan.deployment.limits.max_num_tokens, plan.deployment.limits.max_batch_size
    if asked is None or plan.drafter is None:
        return
    rows = batch * plan.block_size
    if rows > asked:
        what = f"{batch} blocks of {plan.block_size} slots are {rows} rows a step, max_num_tokens is {asked}"
        do = f"set it to {rows}, or limits.max_batch_size to {asked // plan.block_size}"
        yield Problem(what, "limits.max_num_tokens", do)


def _weights(plan: Plan, gpu: Gpu) -> Problem:
    what = f"about {plan.weight_bytes / GIB:.0f} GiB of weights a device, of {gpu.memory // GIB} GiB on a {gpu.name}"
    return Problem(what, "parallel.tensor", "use more devices, or a smaller precision")


def _arena(plan: Plan, gpu: Gpu) -> Iterator[Problem]:
    limits, budget = plan.deployment.limits, arena_budget(gpu, plan.weight_bytes)
    arena = plan.arena
    needed = arena.bytes(limits.max_batch_size, plan.max_model_len)
    if needed <= budget:
        return
    config = arena.drafter
    what = (
        f"the drafter's context needs {needed / GIB:.1f} GiB a device ({limits.max_batch_size} + 1 slots x "
        f"{config.num_layers} layers x {plan.max_model_len} tokens + {plan.block_size} x {arena.kv_heads} K/V heads x "
        f"{config.head_dim} x 2 x 2 bytes), {budget / GIB:.1f} GiB can be spared"
    )
    options = []
    if batch := arena.largest_batch(budget, plan.max_model_len):
        options.append(f"limits.max_batch_size to {batch}")
    if length := arena.longest(budget, limits.max_batch_size):
        options.append(f"limits.max_model_len to {length}")
    yield Problem(what, "limits", f"lower {' or '.join(options)}" if options else "use more devices, or a larger GPU")

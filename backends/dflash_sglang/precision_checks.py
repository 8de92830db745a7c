"""Number formats: what a GPU has not, and the traps between a quantised target and its drafter."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.errors import Problem

from .plan import Plan


def precision_problems(plan: Plan) -> Iterator[Problem]:
    """Weights, K/V and arithmetic."""
    yield from _target(plan)
    yield from _drafter(plan)
    yield from _key_values(plan)
    if plan.deployment.hardware.dtype == "float32":
        what = "SGLang runs DFlash drafts in bfloat16 only" if plan.checkpoint else "SGLang serves in bfloat16"
        yield Problem(what, "hardware.dtype", "use auto or bfloat16")


def _target(plan: Plan) -> Iterator[Problem]:
    asked, native = plan.deployment.target.quantization, plan.target.native_quantization
    where, gpu = "target.quantization", plan.gpu
    if asked != "none" and native is not None and native != asked:
        yield Problem(f"{asked} is asked for, but the checkpoint is {native}", where, f"set it to {native}")
    elif asked in ("nvfp4", "mxfp4") and native is None:
        what = f"{asked} is asked for, but the checkpoint is not quantised"
        yield Problem(what, where, f"give a checkpoint in {asked}; `dflash-serve build` makes one")
    if (asked == "nvfp4" or native == "nvfp4") and gpu is not None and not gpu.is_blackwell:
        yield Problem(f"{gpu.name} has no FP4 arithmetic", where, "use fp8, or a b200 or b300")
    if plan.checkpoint is not None and plan.target.head_is_quantized:
        what = "the target's lm_head is quantised to NVFP4; the drafter drafts through it (sglang#35534)"
        yield Problem(what, "target.model", "use a checkpoint that leaves lm_head out")


def _drafter(plan: Plan) -> Iterator[Problem]:
    drafter = plan.deployment.drafter
    if drafter is not None and plan.checkpoint is not None and drafter.quantization != "none":
        what = "SGLang's DFlash drafts are not quantised: fc stays dense and the fused K/V path refuses quantised q/k/v"
        yield Problem(what, "drafter.quantization", "set it to none; the drafter is small beside its target")


def _key_values(plan: Plan) -> Iterator[Problem]:
    dtype, gpu = plan.deployment.kv_cache.dtype, plan.gpu
    if dtype != "nvfp4":
        return
    if gpu is not None and not gpu.is_blackwell:
        yield Problem(f"{gpu.name} has no FP4 arithmetic", "kv_cache.dtype", "use fp8 or bfloat16")
    elif plan.checkpoint is not None:
        what = "SGLang refuses DFlash on NVFP4 keys and values (arg_groups/kv_cache_hook.py)"
        yield Problem(what, "kv_cache.dtype", "use fp8 or bfloat16")

"""Everything in which a Deployment and SGLang 0.5.22-0.5.23 do not go together, from files alone."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.pairing import check_pairing
from dflash_serve.checkpoint.quantization import plain_only
from dflash_serve.deployment_checks import block_problems, length_problems
from dflash_serve.errors import Problem

from .memory import memory_problems
from .parallel_checks import parallel_problems
from .plan import Plan
from .precision_checks import precision_problems
from .release import installed, release_problems

CAPTURING = (
    *("beam", "deepseek", "gemma4", "glm4_moe_lite", "glm5", "gpt_oss", "inkling", "kimi", "laguna", "lfm2", "llama"),
    *("mimo", "minicpm", "minimax", "mistral", "muse", "nanbeige", "nemotron", "qwen3"),
)
"""Families (model_type's beginning) whose SGLang model hands out hidden states (`set_dflash_layers_to_capture`)."""


def problems(plan: Plan) -> list[Problem]:
    """All of them: the drafter's own first, because the others may follow from them."""
    found = list(plan.checkpoint.problems) if plan.checkpoint else []
    found += plain_only(plan.checkpoint.quantization if plan.checkpoint else None, "SGLang", "drafter.model")
    found += release_problems(installed())
    if plan.drafter is not None:
        found += check_pairing(plan.drafter, plan.target.shape)
        found += _drafter_problems(plan, plan.drafter)
    found += parallel_problems(plan)
    found += precision_problems(plan)
    found += _limits(plan)
    found += memory_problems(plan)
    return found


def _drafter_problems(plan: Plan, drafter: DrafterConfig) -> Iterator[Problem]:
    yield from block_problems(plan.deployment, drafter)
    family = plan.target.shape.model_type
    if not family.startswith(CAPTURING):
        what = f"SGLang's model for {family!r} does not hand out hidden states"
        yield Problem(what, "target.model", "serve without a drafter, or use another backend")
    if drafter.has_mask_embedding:
        what = "SGLang reads a mask embedding from a pickle only, which we never write"
        yield Problem(what, "drafter.model", "use a drafter that masks with a token, or another backend")
    if drafter.embedding_scale != 1.0 and not family.startswith("gemma"):
        what = f"input_embedding_scale is {drafter.embedding_scale}, SGLang scales for Gemma targets only"
        yield Problem(what, "drafter.model", "use another backend")
    yield from _attention(plan, drafter)


def _attention(plan: Plan, drafter: DrafterConfig) -> Iterator[Problem]:
    """Windows and positions: one window for all, told to SGLang by layer_types and is_causal."""
    windows = {kind.window for kind in drafter.layers} - {None}
    if len(windows) > 1:
        what = f"its layers have different windows ({', '.join(map(str, sorted(filter(None, windows))))})"
        yield Problem(what, "drafter.model", "SGLang's drafts have one window; use another backend")
    by_rule = all(kind.causal == (kind.window is not None) for kind in drafter.layers)
    if not by_rule and len({kind.causal for kind in drafter.layers}) > 1:
        what = "some layers are causal and others not, other than sliding ones causal"
        yield Problem(what, "drafter.model", "SGLang has one is_causal for all layers; use another backend")
    window = plan.deployment.speculation.draft_window
    block = plan.block_size or 0
    if window is not None and window < block:
        what = f"draft_window {window} is smaller than the block of {block} slots"
        yield Problem(what, "speculation.draft_window", f"use {block} or more")
    longest = plan.deployment.limits.max_model_len or plan.target.shape.max_position_embeddings or 0
    if window is None and not windows and longest > drafter.max_position_embeddings and drafter.rope.scaling is None:
        what = f"{longest} tokens, but its RoPE was made for {drafter.max_position_embeddings} positions"
        do = f"set limits.max_model_len to {drafter.max_position_embeddings}: beyond, acceptance is unknown"
        yield Problem(what, "drafter.model", do)


def _limits(plan: Plan) -> Iterator[Problem]:
    yield from length_problems(plan.deployment, plan.target.shape)
    window = plan.deployment.speculation.draft_window
    if window is not None and plan.checkpoint is None:
        yield Problem("there is no drafter", "speculation.draft_window", "name one, or remove the window")

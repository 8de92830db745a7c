"""EAGLE-3 and MTP, as vLLM 0.32-0.33 runs them beside DFlash: what it has no model for, and its arguments."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.draft_method import EAGLE3, MTP, Eagle3Head
from dflash_serve.errors import Problem

from .checks import why_not_captured

DRAFTING = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Arguments that make vLLM draft."""
WITH_MTP = (
    *("bailing", "deepseek_v3", "deepseek_v4", "dots3_note", "ernie4_5_moe", "exaone4_5", "exaone_moe", "glm4_moe"),
    *("glm5_next", "glm_moe_dsa", "glm_ocr", "hy_v3", "hy_v4", "inkling", "intern_s2", "interns2", "kimi_k3"),
    *("longcat_flash", "mimo", "minimax_m3", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "qwen4_exp"),
    *("step3p5", "step3p7"),
)
"""Families (model_type's beginning) whose MTP layers it makes a drafter of (`SpeculativeConfig.hf_config_override`)."""


def method_problems(target: TargetLayout, head: Eagle3Head | None) -> Iterator[Problem]:
    """A target that vLLM has no such drafter for."""
    family = target.shape.model_type
    why_not = why_not_captured(family) if head is not None else None
    if why_not is not None:
        yield Problem(why_not, f"--variants {EAGLE3}", "leave it out")
    if head is None and not family.startswith(WITH_MTP):
        yield Problem(f"vLLM has no MTP drafter for {family!r}", f"--variants {MTP}", "leave it out")


def method_arguments(head: Eagle3Head | None, draft_tokens: int) -> dict[str, JsonValue]:
    """vLLM's `SpeculativeConfig`; everything else is its own choice."""
    model: dict[str, JsonValue] = {} if head is None else {"model": head.checkpoint}
    method = MTP if head is None else EAGLE3
    return {"speculative-config": {"method": method, **model, "num_speculative_tokens": draft_tokens}}

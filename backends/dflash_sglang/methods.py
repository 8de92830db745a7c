"""EAGLE-3 and MTP, as SGLang 0.5.23 runs them beside DFlash: what it has no model for, and its arguments."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.draft_method import Eagle3Head
from dflash_serve.errors import Problem

DRAFTING = (
    *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
    *("speculative_draft_model", "speculative_draft_model_path", "speculative_draft_model_quantization"),
)
"""Arguments that say whether and how SGLang drafts."""
HEADS = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")
"""Architectures of EAGLE-3 heads that it has a model for (`models/llama_eagle3.py`, `kimi_k25_eagle3.py`); it would
load any other as what its name says."""
WITH_MTP = (
    *(
        "Bailing",
        "DeepseekV3",
        "DeepseekV4",
        "Dots3",
        "Ernie4_5_Moe",
        "ExaoneMoE",
        "ExaoneMoe",
        "GigaChat35",
        "Glm4Moe",
    ),
    *("Glm5Next", "GlmMoeDsa", "GlmOcr", "HYV3", "HYV4", "Inkling", "InternS2", "LongcatFlash", "MiMo", "NemotronH"),
    *("Qwen3Next", "Qwen3_5", "Qwen4Exp", "Step3p5", "Step3p7"),
)
"""Architectures (their beginning) whose MTP layers it makes a drafter of (`ModelConfig._config_draft_model`); of any
other it would load the whole target once more."""


def method_problems(target: TargetLayout, head: Eagle3Head | None) -> Iterator[Problem]:
    """A head or a target that SGLang has no drafter for."""
    if head is not None and head.architecture not in HEADS:
        what = f"SGLang has no EAGLE-3 model for {head.architecture}, it has {' and '.join(HEADS)}"
        yield Problem(what, head.checkpoint, "use a head in that form, or --backend vllm")
    if head is None and not target.architecture.startswith(WITH_MTP):
        yield Problem(f"SGLang has no MTP drafter for {target.architecture}", "--variants mtp", "leave it out")


def method_arguments(head: Eagle3Head | None, draft_tokens: int) -> dict[str, JsonValue]:
    """A chain of drafts; SGLang counts the target's own token among those that it verifies."""
    chain: dict[str, JsonValue] = {
        "speculative-num-steps": draft_tokens,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": draft_tokens + 1,
    }
    if head is None:
        return {"speculative-algorithm": "NEXTN", **chain}
    # Otherwise a head inherits the target's quantisation, like a DFlash drafter.
    plain: dict[str, JsonValue] = {} if head.quantized else {"speculative-draft-model-quantization": "unquant"}
    model: dict[str, JsonValue] = {"speculative-draft-model-path": head.checkpoint}
    return {"speculative-algorithm": "EAGLE3", **model, **chain, **plain}

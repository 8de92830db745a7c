"""One built-in target and the built-in drafter."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._torch.models.modeling_utils import register_auto_model, register_draft_model
from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode


@register_auto_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM:
    pass


@register_draft_model(SpeculativeDecodingMode.DFLASH)  # type: ignore[untyped-decorator]
def build(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> str:
    return "built-in"

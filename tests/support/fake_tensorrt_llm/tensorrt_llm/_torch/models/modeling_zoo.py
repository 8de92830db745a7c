"""One built-in target, which reads pictures, and whose layers a drafter may have."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._torch.models.modeling_layers import DraftLayers
from tensorrt_llm._torch.models.modeling_utils import register_auto_model, register_vision_encoder
from tensorrt_llm.inputs.registry import INPUT_PROCESSOR_REGISTRY


class VisionEncoder:
    pass


class PictureProcessor:
    pass


@register_vision_encoder(VisionEncoder)
@register_auto_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(DraftLayers):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)


INPUT_PROCESSOR_REGISTRY._input_processors_cls_by_model_type[Qwen3ForCausalLM] = PictureProcessor

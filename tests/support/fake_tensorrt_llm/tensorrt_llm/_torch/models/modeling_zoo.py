"""One built-in target, which reads pictures, and whose layers a drafter may have (modules/linear.py).

As upstream: FP8 parts of a fused product are rounded again to the largest of their scales; NVFP4 parts must have one
`weight_scale_2` and one `input_scale` (`NVFP4LinearMethod.load_weight_scales` @00bbf71e). NVFP4 block scales are
rearranged as they are loaded (here: reversed), so that the parameters are no longer what the checkpoint said.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.models.modeling_utils import register_auto_model, register_vision_encoder
from tensorrt_llm.inputs.registry import INPUT_PROCESSOR_REGISTRY
from torch import Tensor, nn

from dflash_serve.checkpoint.formats import QuantizedTensor

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Linear(nn.Module):
    """x @ W^T; the parts that a checkpoint has apart are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = None
        self.bias: Any = None
        self.scale: Any = None
        self.scale_2: Any = None

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        self.weight = torch.cat([part["weight"] for part in parts])
        scales = [part["weight_scale"] for part in parts if "weight_scale" in part]
        if self.weight.dtype == torch.float8_e4m3fn:
            self.scale = torch.stack([scale.reshape(()) for scale in scales]).max()
            again = [part["weight"].float() * part["weight_scale"] / self.scale for part in parts]
            self.weight = torch.cat(again).to(torch.float8_e4m3fn)
        elif self.weight.dtype == torch.uint8:
            self.scale = torch.cat(scales).flip(0)
            self.scale_2 = _only("weight_scale_2", parts)
            _only("input_scale", parts)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype == torch.float8_e4m3fn:
            weight = weight.float() * self.scale
        elif weight.dtype == torch.uint8:
            weight = QuantizedTensor("nvfp4", weight, self.scale.flip(0), self.scale_2).dequantize()
        return F.linear(x, weight.to(x.dtype))


def _only(name: str, parts: list[dict[str, Tensor]]) -> Tensor | None:
    """The scale that all parts of a fused product have; None where none has one."""
    found = [part[name] for part in parts if name in part]
    assert all(torch.equal(scale, found[0]) for scale in found), f"The {name} should be same for all the weights"
    return found[0] if found else None


class Norm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self.weight: Any = None

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        self.weight = nn.Parameter(parts[0]["weight"], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn: Any = nn.Module()
        attention = self.self_attn
        attention.head_dim, attention.num_heads = config.head_dim, config.num_attention_heads
        attention.num_key_value_heads = config.num_key_value_heads
        attention.q_size = config.num_attention_heads * config.head_dim
        attention.kv_size = config.num_key_value_heads * config.head_dim
        attention.qkv_proj, attention.o_proj = Linear(), Linear()
        attention.q_norm, attention.k_norm = Norm(config.rms_norm_eps), Norm(config.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = Norm(config.rms_norm_eps), Norm(config.rms_norm_eps)
        self.mlp: Any = nn.Module()
        self.mlp.gate_up_proj, self.mlp.down_proj = Linear(), Linear()


class DraftLayers(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        config = config.pretrained_config
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.model.norm, self.lm_head = Norm(config.rms_norm_eps), None

    def load_weights(self, weights: dict[str, Tensor], weight_mapper: Any = None, **_: Any) -> None:
        """Partial loading is allowed: a parameter without weights silently keeps its values."""
        for name, module in self.named_modules():
            if hasattr(module, "load"):
                room, leaf = name.rpartition(".")[::2]
                sources = [f"{room}.{part}" for part in FUSED.get(leaf, (leaf,))]
                parts = [
                    {key.removeprefix(f"{s}."): value for key, value in weights.items() if key.startswith(f"{s}.")}
                    for s in sources
                ]
                if all(parts):
                    module.load(parts)


class VisionEncoder:
    pass


class PictureProcessor:
    pass


@register_vision_encoder(VisionEncoder)
@register_auto_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(DraftLayers):
    pass


INPUT_PROCESSOR_REGISTRY._input_processors_cls_by_model_type[Qwen3ForCausalLM] = PictureProcessor

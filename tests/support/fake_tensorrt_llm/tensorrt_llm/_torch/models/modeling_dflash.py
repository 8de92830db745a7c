"""The built-in drafter (modeling_dflash.py @7c7504c): its fused K/V product takes `qkv_proj.weight` as it is stored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.models.modeling_utils import get_model_architecture, register_draft_model
from tensorrt_llm._torch.speculative.dflash_attention import get_dflash_flash_attention
from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode
from torch import Tensor, nn

from dflash_serve.models.layers import RotaryEmbedding, rotate


class DFlashForCausalLM(nn.Module):
    def __init__(self, draft_config: Any, *, dflash_attention_backend: str = "VANILLA") -> None:
        super().__init__()
        config = draft_config.pretrained_config
        try:
            layers, _ = get_model_architecture(config)
        except RuntimeError:
            original = config.architectures
            config.architectures = ["".join(w.capitalize() for w in config.model_type.split("_")) + "ForCausalLM"]
            layers, _ = get_model_architecture(config)
            config.architectures = original
        self.draft_model_full = layers(draft_config)
        self.model, self.config, self.model_config = self.draft_model_full.model, config, draft_config
        self.mask_token_id, self.block_size = config.dflash_config["mask_token_id"], config.block_size
        self.dflash_attention_backend, self.attention = dflash_attention_backend, get_dflash_flash_attention()
        self.lm_head: Any = None
        self.logits_processor: Any = None
        self._fused_kv_weight: Any = None
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)

    def load_weights(self, weights: Any, weight_mapper: Any = None, **_: Any) -> None:
        weights = dict(weights.items())
        rows, columns = weights["fc.weight"].shape
        self.fc = nn.Linear(columns, rows, bias=False, dtype=weights["fc.weight"].dtype)
        self.fc.weight = nn.Parameter(weights.pop("fc.weight"), requires_grad=False)
        self.hidden_norm = nn.RMSNorm(len(weights["hidden_norm.weight"]), eps=self.config.rms_norm_eps)
        self.hidden_norm.weight = nn.Parameter(weights.pop("hidden_norm.weight"), requires_grad=False)
        self.draft_model_full.load_weights({f"model.{name}": tensor for name, tensor in weights.items()})

    def load_weights_from_target_model(self, target: Any) -> None:
        self.draft_model_full.model.embed_tokens = target.model.embed_tokens
        self.lm_head = target.lm_head

    def project_target_hidden(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))
        return out

    def _build_fused_kv_buffers(self) -> None:
        if self._fused_kv_weight is not None:
            return
        attention = [layer.self_attn for layer in self.model.layers]
        first = attention[0]
        rows = [a.qkv_proj.weight[a.q_size : a.q_size + 2 * a.kv_size] for a in attention]
        self._k_norm_stacked = torch.stack([a.k_norm.weight.data for a in attention])
        self._num_attn_layers, self._num_heads = len(attention), first.num_heads
        self._num_kv_heads, self._head_dim = first.num_key_value_heads, first.head_dim
        self._fused_kv_weight = torch.cat(rows).contiguous()

    def precompute_context_kv(self, projected: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        weight = self._fused_kv_weight
        shape = (len(projected), self._num_attn_layers, 2, self._num_kv_heads, self._head_dim)
        if weight.dtype == torch.uint8:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        # On a GPU an FP8 weight would be multiplied without its scale after a cast of the input; so here.
        k, v = F.linear(projected, weight.to(projected.dtype)).view(shape).unbind(2)
        k = F.rms_norm(k, (self._head_dim,), eps=self.config.rms_norm_eps) * self._k_norm_stacked[:, None]
        cos, sin = self.rotary(positions.reshape(-1))
        return rotate(k, cos[:, None], sin[:, None]), v.contiguous()

    def dflash_forward(
        self, noise_embedding: Tensor, query_positions: Tensor, num_ctx_per_req: Tensor, ctx_k_cache: Tensor,
        ctx_v_cache: Tensor, ctx_cache_batch_idx: Tensor, ctx_kv_cache: Any = None, ctx_page_table: Any = None,
    ) -> Tensor:  # fmt: skip
        requests, block, hidden = noise_embedding.shape
        h = noise_embedding.reshape(-1, hidden)
        cos, sin = self.rotary(query_positions.reshape(-1))
        for index, layer in enumerate(self.model.layers):
            a = layer.self_attn
            qkv = a.qkv_proj(layer.input_layernorm(h)).view(len(h), -1, a.head_dim)
            q, k, v = qkv.split([a.num_heads, a.num_key_value_heads, a.num_key_value_heads], dim=1)
            q, k = rotate(a.q_norm(q), cos, sin), rotate(a.k_norm(k), cos, sin)
            out = self.attention(
                q=q.reshape(requests, block, -1, a.head_dim), k=k.reshape(requests, block, -1, a.head_dim),
                v=v.reshape(requests, block, -1, a.head_dim), k_cache=ctx_k_cache[:, index],
                v_cache=ctx_v_cache[:, index], cache_seqlens=num_ctx_per_req, cache_batch_idx=ctx_cache_batch_idx,
                causal=False, window_size=(-1, -1),
            )  # fmt: skip
            h = h + a.o_proj(out.reshape(len(h), -1))
            gate, up = layer.mlp.gate_up_proj(layer.post_attention_layernorm(h)).chunk(2, dim=-1)
            h = h + layer.mlp.down_proj(F.silu(gate) * up)
        hidden_states: Tensor = self.model.norm(h)
        return hidden_states


@register_draft_model(SpeculativeDecodingMode.DFLASH)  # type: ignore[untyped-decorator]
def build(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> DFlashForCausalLM:
    return DFlashForCausalLM(draft_config, dflash_attention_backend=model_config.spec_config.attention_backend)

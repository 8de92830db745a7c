"""The steps of TensorRT-LLM's DFlash worker around a draft model, in the order and with the shapes it uses.

It knows the draft model by its duck-typed contract only. Requests have entries in a dense arena
[entries + 1, layers, max_ctx + B, kv_heads, head_dim]; the last entry takes the padding of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Worker:
    """Drives `draft_model`; B = max_draft_len + 1."""

    def __init__(self, draft_model: Any, *, max_batch: int, max_seq_len: int, max_draft_len: int) -> None:
        if getattr(draft_model, "dflash_attention_backend", None) != "VANILLA":
            raise ValueError("worker and draft model attention backends must match")
        self.model, self.block = draft_model, max_draft_len + 1
        assert self.block <= draft_model.block_size
        draft_model._build_fused_kv_buffers()
        self.max_ctx = min(max_seq_len, draft_model.config.max_position_embeddings)
        shape = (
            max_batch + 1,
            draft_model._num_attn_layers,
            self.max_ctx + self.block,
            draft_model._num_kv_heads,
            draft_model._head_dim,
        )
        self.keys = torch.zeros(shape, dtype=draft_model.fc.weight.dtype)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(max_batch + 1, dtype=torch.long)

    def prefill(self, entry: int, features: Tensor) -> None:
        """A chunk of a prompt: captured features [tokens, F*H], layers ascending."""
        start = int(self.lengths[entry])
        positions = torch.arange(start, start + len(features))
        projected = self.model.project_target_hidden(features).to(self.keys.dtype)
        k, v = self.model.precompute_context_kv(projected, positions)
        self.keys[entry, :, start : start + len(features)] = k.permute(1, 0, 2, 3)
        self.values[entry, :, start : start + len(features)] = v.permute(1, 0, 2, 3)
        self.lengths[entry] = start + len(features)

    def draft(self, entries: Sequence[int], accepted: Tensor, features: Tensor, bonus: Tensor) -> Tensor:
        """One step: keep the accepted rows' features, then fill the blocks.

        Args:
            entries: of the requests.
            accepted: tokens gained, the bonus counted [requests].
            features: of all B verified rows [requests, B, F*H]; only the first `accepted` of each are kept.
            bonus: newest token of each request [requests].

        Returns:
            Draft logits [requests, B - 1, vocabulary].
        """
        where = torch.tensor(entries)
        offsets = torch.arange(self.block)
        before = self.lengths[where]
        columns = (before[:, None] + offsets).clamp(max=self.max_ctx - 1)
        projected = self.model.project_target_hidden(features.reshape(-1, features.shape[-1]))
        k, v = self.model.precompute_context_kv(projected.to(self.keys.dtype), (before[:, None] + offsets).reshape(-1))
        keep = (offsets < accepted[:, None]).reshape(-1, 1, 1, 1).to(k.dtype)
        k.mul_(keep)
        v.mul_(keep)
        rows = where[:, None].expand_as(columns).reshape(-1)
        self.keys[rows, :, columns.reshape(-1)] = k
        self.values[rows, :, columns.reshape(-1)] = v
        self.lengths[where] = (before + accepted).clamp(max=self.max_ctx)
        hidden = self._hidden(where, bonus)
        gathered = (torch.arange(len(entries))[:, None] * self.block + offsets[1:]).reshape(-1)
        logits = self.model.logits_processor(hidden[gathered], self.model.lm_head, None, True)
        shaped: Tensor = logits.reshape(len(entries), self.block - 1, -1)
        return shaped

    def _hidden(self, where: Tensor, bonus: Tensor) -> Tensor:
        """The draft model over a block of each request: [requests * B, H]."""
        hidden: Tensor = self.model.dflash_forward(
            noise_embedding=self._noise(bonus),
            query_positions=self.lengths[where][:, None] + torch.arange(self.block),
            num_ctx_per_req=self.lengths[where],
            ctx_k_cache=self.keys,
            ctx_v_cache=self.values,
            ctx_cache_batch_idx=where,
            ctx_kv_cache=None,
            ctx_page_table=None,
        )
        return hidden

    def _noise(self, bonus: Tensor) -> Tensor:
        """[requests, B, H]: the target's embedding of the newest token, then of the mask token."""
        embed = self.model.draft_model_full.model.embed_tokens
        rows: Tensor = embed(torch.cat([bonus, torch.tensor([int(self.model.mask_token_id)])]))
        noise = rows[-1].expand(len(bonus), self.block, -1).clone()
        noise[:, 0] = rows[:-1]
        return noise

"""SGLang's own PyTorch attention, taught to serve a block that is verified (TARGET_VERIFY)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_cpu_platform.platform import ATTENTION


def install() -> None:
    """Registers the attention in the place of the one it extends."""
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if ATTENTION not in DRAFT_ATTENTION_BACKEND_CHOICES:
        DRAFT_ATTENTION_BACKEND_CHOICES.append(ATTENTION)
    ATTENTION_BACKENDS[ATTENTION] = _block_attention


def _block_attention(runner: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BlockAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        """A block of n rows after a prefix is an extend by n rows."""

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
        ) -> Any:
            batch = as_extend(forward_batch) if forward_batch.forward_mode.is_target_verify() else forward_batch
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache)

    return BlockAttention(runner)


def as_extend(batch: Any) -> SimpleNamespace:
    """A verification as SGLang's extend: seq_lens counts the block, the prefix does not."""
    rows = int(batch.spec_info.draft_token_num)
    return SimpleNamespace(
        forward_mode=batch.forward_mode,
        out_cache_loc=batch.out_cache_loc,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens + rows,
        extend_prefix_lens=batch.seq_lens,
        extend_seq_lens=torch.full_like(batch.seq_lens, rows),
        encoder_lens=None,
    )

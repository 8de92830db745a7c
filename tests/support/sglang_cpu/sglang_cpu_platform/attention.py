"""SGLang's own PyTorch attention, taught to serve a block that is verified (TARGET_VERIFY)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

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
        """A block of n rows after a prefix is an extend by n rows; rows attend alike in every kind of step."""

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
        ) -> Any:
            batch = as_extend(forward_batch) if forward_batch.forward_mode.is_target_verify() else forward_batch
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache)

        def _run_sdpa_forward_extend(self, query: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            k_cache, v_cache, table, requests, lengths, _, rows, *_ = args
            return attend(query, output, (k_cache, v_cache), (table, requests), lengths, rows, **kwargs)

        def _run_sdpa_forward_decode(self, query: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            k_cache, v_cache, table, requests, lengths, *_ = args
            rows = torch.ones_like(lengths)
            return attend(query, output, (k_cache, v_cache), (table, requests), lengths, rows, **kwargs)

    return BlockAttention(runner)


def attend(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table: tuple[torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
    rows: torch.Tensor,
    *,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    sliding_window_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """The last `rows` positions of every request over all of its K/V: a step costs what its rows cost, of any kind.

    SGLang's own form computes every position of the context again for the rows of a block, request by request. Here
    requests with as many rows go together, as far as the longest of them reaches.

    Args:
        table: the K/V entries by request, and the requests.
    """
    (entries, requests), starts = table, rows.cumsum(0) - rows
    window = -1 if sliding_window_size is None else sliding_window_size
    for width in rows.unique().tolist():
        chosen = (rows == width).nonzero().flatten()
        ends = lengths[chosen][:, None, None]
        others = torch.arange(int(ends.max()))
        own = ends - width + torch.arange(width)[:, None]  # [requests, rows, 1]
        mask = others <= own if causal or window > -1 else (others < ends).expand(-1, width, -1)
        if window > -1:
            mask &= others >= own - window
        mine = entries[requests[chosen], : len(others)]
        keys, values = (part[mine].to(query.dtype).transpose(1, 2) for part in cache)
        places = starts[chosen][:, None] + torch.arange(width)
        asked = query[places].transpose(1, 2)
        found = scaled_dot_product_attention(asked, keys, values, mask[:, None], scale=scaling, enable_gqa=enable_gqa)
        output[places] = found.transpose(1, 2)
    return output


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

"""Which attention serves a ragged step: FlashInfer's, or sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_serve.drafter.config import AttentionKind
from dflash_serve.drafter.kv_store import KVStore, Span, StoreAttention
from dflash_serve.drafter.model import Attend

from . import flashinfer_attention


def ragged_attention(store: KVStore, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> Attend:
    """Attention of a flat batch of spans over a store, for one step."""
    if flashinfer_attention.usable(store, spans, kinds):
        return flashinfer_attention.FlashInferAttention(store, spans, kinds, heads)
    return StoreAttention(store, spans, kinds, heads)

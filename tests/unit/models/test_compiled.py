"""Compiled operators: PyTorch's results, each row independent of its batch, and a fallback without a compiler."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig
from dflash_serve.models.attention import PlainOperators, RaggedAttention
from dflash_serve.models.compiled.build import find_compiler, load_kernels
from dflash_serve.models.compiled.operators import (
    CompiledAttention,
    CompiledOperators,
    compiled_operators,
    step_attention,
)
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.layers import RotaryEmbedding, rotate

HEADS, KV_HEADS = 6, 2
DTYPES = (torch.float32, torch.bfloat16)
SPANS = [Span(2, 40, 4), Span(0, 0, 3), Span(3, 251, 1), Span(1, 9, 32)]
LONG_SPANS = [Span(2, 1100, 3), Span(0, 505, 16), Span(3, 511, 1), Span(1, 1020, 8)]
"""Several threads share these, 512 keys each."""
KINDS = [AttentionKind(causal=causal, window=window) for causal in (True, False) for window in (None, 10, 2)]
DIMS, WIDE = (8, 64, 128, 64, 128, 8), AttentionKind(causal=True, window=600)
NEAR: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def operators(dtype: torch.dtype) -> CompiledOperators:
    found = compiled_operators(dtype, torch.device("cpu"))
    assert found is not None
    return found


def filled_cache(dim: int, dtype: torch.dtype, capacity: int = 300) -> KVCache:
    cache = KVCache(layers=2, entries=4, kv_heads=KV_HEADS, capacity=capacity, head_dim=dim, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return cache


def attend(qkv: Tensor, spans: list[Span], cache: KVCache, kind: AttentionKind, norms: list[nn.RMSNorm]) -> Tensor:
    """The second layer's attention, compiled."""
    cos, sin = RotaryEmbedding(RopeConfig(theta=10000.0), cache.keys.shape[-1], 1200)(span_positions(spans))
    compiled = step_attention(operators(qkv.dtype), cache, spans, [kind, kind], HEADS, 1e-5)
    assert isinstance(compiled, CompiledAttention)
    return compiled.rotated(1, qkv, cos, sin, norms or None)


def plainly(qkv: Tensor, spans: list[Span], cache: KVCache, kind: AttentionKind, norms: list[nn.RMSNorm]) -> Tensor:
    dim = cache.keys.shape[-1]
    cos, sin = RotaryEmbedding(RopeConfig(theta=10000.0), dim, 1200)(span_positions(spans))
    q, k, v = qkv.view(len(qkv), -1, dim).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = (norm(x) for norm, x in zip(norms, (q, k), strict=True)) if norms else (q, k)
    attention = RaggedAttention(cache, spans, [kind, kind], HEADS)
    return attention(1, rotate(q, cos, sin), rotate(k, cos, sin), v).reshape(len(qkv), -1)


SHORT_AND_LONG = [
    *((SPANS, 300, kind, DIMS[n], n % 2 == 0, DTYPES[n // 2 % 2]) for n, kind in enumerate(KINDS)),
    *((LONG_SPANS, 1200, kind, 64, n % 2 == 1, DTYPES[n % 2]) for n, kind in enumerate([*KINDS, WIDE])),
]


@pytest.mark.parametrize(("spans", "capacity", "kind", "dim", "normed", "dtype"), SHORT_AND_LONG)
@torch.inference_mode()
def test_attention_is_pytorchs_and_writes_the_same_keys_and_values(
    spans: list[Span], capacity: int, kind: AttentionKind, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    norms = [nn.RMSNorm(dim, 1e-5).to(dtype) for _ in range(2)] if normed else []
    for norm in norms:
        norm.weight.normal_()
    qkv = torch.randn(sum(span.length for span in spans), (HEADS + 2 * KV_HEADS) * dim).to(dtype)
    cache, expected_cache = (filled_cache(dim, dtype, capacity) for _ in range(2))
    for each in (cache, expected_cache):  # nothing was ever written behind the spans
        for entry, start, length in spans:
            each.keys[:, entry, :, start + length :] = float("nan")
            each.values[:, entry, :, start + length :] = float("nan")
    found, expected = attend(qkv, spans, cache, kind, norms), plainly(qkv, spans, expected_cache, kind, norms)
    torch.testing.assert_close(found, expected, **NEAR[dtype])
    torch.testing.assert_close(cache.keys, expected_cache.keys, equal_nan=True, **NEAR[dtype])
    torch.testing.assert_close(cache.values, expected_cache.values, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("start", "window", "dtype"),  # threads share 512 keys and more
    [
        (90, None, torch.float32),
        (90, 10, torch.bfloat16),
        (507, None, torch.bfloat16),
        (507, 600, torch.float32),
        (1020, None, torch.float32),
        (1020, 10, torch.float32),
        (1020, 600, torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_a_row_of_a_block_comes_out_bit_for_bit_as_alone(start: int, window: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    kind = AttentionKind(causal=True, window=window)
    qkv = torch.randn(8, (HEADS + 2 * KV_HEADS) * 64).to(dtype)
    alone, together = (filled_cache(64, dtype, 1200) for _ in range(2))
    rows = [attend(qkv[n : n + 1], [Span(1, start + n, 1)], alone, kind, []) for n in range(8)]
    block = attend(torch.cat([qkv, qkv]), [Span(1, start, 8), Span(3, 200, 8)], together, kind, [])
    assert torch.equal(torch.cat(rows), block[:8])
    assert torch.equal(alone.keys[:, 1], together.keys[:, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 200])  # one thread and several
@torch.inference_mode()
def test_norm_and_swiglu_are_pytorchs_and_a_rows_own(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    norm = nn.RMSNorm(570, 1e-5).to(dtype)
    norm.weight.normal_()
    h, delta = torch.randn(rows, 570).to(dtype), torch.randn(rows, 570).to(dtype)
    ours, plain = operators(dtype), PlainOperators()
    for added in (None, delta):
        found, expected = ours.add_norm(h.clone(), added, norm), plain.add_norm(h, added, norm)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], **NEAR[dtype])
        last = ours.add_norm(h[-1:].clone(), None if added is None else added[-1:], norm)
        assert torch.equal(last[1], found[1][-1:])
    gate_up = torch.randn(rows, 570).to(dtype)
    torch.testing.assert_close(ours.silu_product(gate_up), plain.silu_product(gate_up), **NEAR[dtype])
    assert torch.equal(ours.silu_product(gate_up)[-1:], ours.silu_product(gate_up[-1:]))


def test_long_spans_and_contexts_are_left_to_pytorch() -> None:
    kind = AttentionKind(causal=True, window=None)
    cache = KVCache(layers=1, entries=1, kv_heads=KV_HEADS, capacity=40_000, head_dim=8)
    for span, ours in (
        (Span(0, 0, 1024), True),
        (Span(0, 16, 1024), False),
        (Span(0, 39_000, 16), True),
        (Span(0, 39_000, 32), False),
    ):
        found = step_attention(operators(torch.float32), cache, [Span(0, 0, 1), span], [kind], HEADS, 1e-5)
        assert isinstance(found, CompiledAttention) == ours


def test_a_span_outside_the_cache_is_never_written() -> None:
    kind = AttentionKind(causal=True, window=None)
    for span in (Span(4, 0, 1), Span(0, 300, 1)):
        with pytest.raises(IndexError, match="outside the K/V cache"):
            step_attention(operators(torch.float32), filled_cache(8, torch.float32), [span], [kind], HEADS, 1e-5)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_one_line_says_so(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO):
        assert load_kernels.__wrapped__() is None
    assert len(caplog.records) == 1
    assert "PyTorch's own" in caplog.text


def test_a_copy_of_a_model_runs_the_same_library() -> None:
    ours = operators(torch.float32)
    assert copy.deepcopy(ours) is ours

"""The drafter laid out for decoding, against the drafter itself: hidden states and the K/V that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.compiled.build import find_compiler
from dflash_serve.models.compiled.operators import CompiledAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.loader import load_drafter
from tests.support.tiny import tiny_drafter_config, write_tiny_drafter

SPANS = [Span(1, 30, 4), Span(0, 0, 4), Span(2, 11, 4)]
KINDS = {
    "bidirectional": AttentionKind(causal=False, window=None),
    "causal": AttentionKind(causal=True, window=None),
    "windowed": AttentionKind(causal=True, window=8),
}
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def drafter_of(folder: Path, kind: AttentionKind) -> Drafter:
    config = tiny_drafter_config(block_size=4)
    write_tiny_drafter(folder, config.model_copy(update={"layers": (kind,) * config.num_layers}))
    return load_drafter(folder, dtype=torch.float32)


def run(drafter: Drafter, spans: Sequence[Span], noise: Tensor) -> tuple[Tensor, KVCache]:
    """A pass over blocks behind contexts whose K/V is the same each time."""
    config = drafter.config
    cache = KVCache.of(config, 3, 64)
    generator = torch.Generator().manual_seed(3)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return drafter(noise, span_positions(spans), drafter.attention(cache, spans), block_size=4), cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
@torch.inference_mode()
def test_it_is_the_drafter_itself(kind: str, compiled: bool, tmp_path: Path) -> None:
    plain = drafter_of(tmp_path / "plain", KINDS[kind])
    noise = torch.randn(12, plain.config.hidden_size, generator=torch.Generator().manual_seed(1))
    before = noise.clone()
    expected, expected_cache = run(plain, SPANS, noise)
    fused = FusedDrafter(drafter_of(tmp_path / "fused", KINDS[kind]), compiled=compiled)
    found, cache = run(fused, SPANS, noise)
    assert torch.equal(noise, before)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.keys, expected_cache.keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.values, expected_cache.values, rtol=1e-4, atol=1e-5)
    assert isinstance(fused.attention(cache, SPANS), CompiledAttention) == compiled


@needs_compiler
@torch.inference_mode()
def test_a_block_comes_out_bit_for_bit_as_alone(tmp_path: Path) -> None:
    fused = FusedDrafter(drafter_of(tmp_path, KINDS["bidirectional"]))
    noise = torch.randn(12, fused.config.hidden_size, generator=torch.Generator().manual_seed(1))
    together, _ = run(fused, SPANS, noise)
    for index, span in enumerate(SPANS):
        rows = slice(4 * index, 4 * index + 4)
        assert torch.equal(run(fused, [span], noise[rows])[0], together[rows])

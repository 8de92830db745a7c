"""Padded passes, the ones a GPU captures: the tokens of the ragged ones, whatever is padded. Run uncaptured here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dflash_serve import SamplingParams
from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.attention import (
    FlashInferAttention,
    PaddedAttention,
    PromptAttention,
    RaggedAttention,
    windows_fit,
)
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.speculation.policy import FixedWidth
from dflash_torch.model_runner import GraphPool, Shape, Shapes, StaticPass
from tests.support import fake_flashinfer
from tests.support.embedded import answers, tiny_engine, with_passes

PROMPTS = [[10 + n, 20, 30 + n, 40, *range(n)] for n in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
KINDS = [AttentionKind(causal=causal, window=window) for causal in (True, False) for window in (None, 10, 2)]


def filled_cache() -> KVCache:
    cache = KVCache(layers=1, entries=4, kv_heads=2, capacity=300, head_dim=16)
    generator = torch.Generator().manual_seed(0)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return cache


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_padded_attention_is_attention_request_by_request(kind: AttentionKind) -> None:
    spans = [Span(2, 40, 4), Span(0, 3, 4), Span(3, 251, 4)]
    q, k, v = (torch.randn(12, heads, 16) for heads in (6, 2, 2))
    expected = RaggedAttention(filled_cache(), spans, [kind], heads=6)(0, q, k, v)
    slots, starts, _ = torch.tensor(spans).unbind(dim=1)
    padded = PaddedAttention(filled_cache(), slots, starts[:, None] + torch.arange(4), 256, [kind], heads=6)
    torch.testing.assert_close(padded(0, q, k, v), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.causal], ids=str)
def test_prompts_of_different_lengths_attend_together(kind: AttentionKind) -> None:
    spans = [Span(2, 40, 3), Span(0, 0, 9), Span(3, 251, 1), Span(1, 290, 10)]  # the last one ends with its entry
    assert PromptAttention.fits(spans, [kind], 6)
    q, k, v = (torch.randn(23, heads, 16) for heads in (6, 2, 2))
    expected, cache = filled_cache(), filled_cache()
    out = RaggedAttention(expected, spans, [kind], heads=6)(0, q, k, v)
    torch.testing.assert_close(PromptAttention(cache, spans, [kind], heads=6)(0, q, k, v), out)
    assert torch.equal(cache.keys, expected.keys)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_flashinfer_is_asked_for_attention_request_by_request(
    kind: AttentionKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    spans = [Span(2, 40, 3), Span(0, 0, 9), Span(3, 251, 1)]
    if not windows_fit(spans, [kind]):
        pytest.skip("a bidirectional window shorter than the block goes request by request")
    q, k, v = (torch.randn(13, heads, 16) for heads in (6, 2, 2))
    expected = RaggedAttention(filled_cache(), spans, [kind], heads=6)(0, q, k, v)
    torch.testing.assert_close(FlashInferAttention(filled_cache(), spans, [kind], heads=6)(0, q, k, v), expected)


def test_shapes_are_few() -> None:
    limits = Shapes(max_batch_size=24, widest=10, capacity=9000)
    shapes = {
        limits.fit([Span(0, start, rows)] * count)
        for count in range(1, 25)
        for rows in range(1, 11)
        for start in range(0, 8990, 50)
    }
    assert shapes == {
        Shape(count, width, length)
        for count in (1, 2, 4, 8, 16, 24)
        for width in (1, 2, 4, 8, 10)
        for length in (256, 512, 1024, 2048, 4096, 8192, 9000)
    }
    assert set(limits.all()) == shapes
    assert Shapes(max_batch_size=1, widest=8, capacity=8192 + 8).lengths[-2:] == (4096, 8200), "no two nearly alike"
    small = Shapes(max_batch_size=1, widest=1, capacity=100)
    assert small.all() == [small.fit([Span(0, 30, 1)])] == [Shape(1, 1, 100)]


def test_all_that_decoding_takes_is_captured_ahead(folders: tuple[Path, Path]) -> None:
    engine = with_passes(tiny_engine(folders, max_batch_size=3, reuse_prefixes=False), static=True)
    scheduler = engine.scheduler
    assert scheduler.speculator is not None
    scheduler.prepare()
    passes = scheduler.target_runner.captured, scheduler.speculator.drafter_runner.captured
    ahead = [set(captured) for captured in passes]
    prompts = [[*prompt, 50, 60] for prompt in PROMPTS]  # of more rows than a block
    for params in (GREEDY, GREEDY.model_copy(update={"temperature": 0.8, "seed": 1})):
        expected = answers(tiny_engine(folders, max_batch_size=3), prompts, params)
        assert [one.token_ids for one in answers(engine, prompts, params)] == [one.token_ids for one in expected]
    assert [set(captured) for captured in passes] == ahead


def test_without_memory_for_a_graph_a_pass_is_launched_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def capture(work: StaticPass) -> None:
        tried.append(work)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(StaticPass, "_capture", capture)
    double = StaticPass(lambda x: (2 * x,), [torch.zeros(3)], GraphPool())
    double.captures = True  # as on a GPU
    assert [double(torch.full((3,), n))[0].tolist() for n in (1.0, 2.0)] == [[2.0] * 3, [4.0] * 3]
    assert len(tried) == 1
    assert "launched one by one: CUDA out of memory" in caplog.text


def test_a_prompt_goes_ragged_and_leaves_the_others_captured(folders: tuple[Path, Path]) -> None:
    ragged, static = (with_passes(tiny_engine(folders), static=static).scheduler for static in (False, True))
    rows = [[5, 7, 7], list(range(20, 45)), [9], list(range(50, 59))]
    spans = [Span(entry, 0, len(row)) for entry, row in enumerate(rows)]
    expected, found = (s.target_runner(rows, spans, s.speculator.target_layer_ids) for s in (ragged, static))  # type: ignore[union-attr]
    torch.testing.assert_close(found.hidden, expected.hidden)
    torch.testing.assert_close(found.features, expected.features)
    assert [shape for shape, _ in static.target_runner.captured] == [Shape(2, 4, 260)]


def test_a_step_that_captures_says_nothing_of_what_others_take(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []
    monkeypatch.setattr(FixedWidth, "observe", lambda _, step: seen.append(step.seconds))
    scheduler = with_passes(tiny_engine(folders), static=True).scheduler
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    scheduler.join(PROMPTS[0], params)
    while len(seen) < 3:
        scheduler.step()
    scheduler.join(PROMPTS[1][:1], params)  # no more rows than a block: another shape, and no prefill by itself
    while len(seen) < 6:
        scheduler.step()
    assert [seconds is None for seconds in seen] == [True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("span", "capacity"),
    [(Span(0, 0, 11), 100), (Span(0, 95, 7), 100)],
    ids=["prefill", "no room behind"],
)
def test_what_no_shape_holds_goes_ragged(span: Span, capacity: int) -> None:
    assert Shapes(max_batch_size=4, widest=10, capacity=capacity).fit([span]) is None


def test_rows_come_back_in_order_without_what_was_padded() -> None:
    spans = [Span(5, 30, 3), Span(2, 7, 1), Span(1, 9, 2)]
    shape = Shape(4, 4, 256)
    table = shape.table(spans, [[11, 12, 13], [21], [31, 32]])
    assert table == [[5, 30, 11, 12, 13, 0], [2, 7, 21, 0, 0, 0], [1, 9, 31, 32, 0, 0], [1, 9, 31, 32, 0, 0]]
    assert shape.real_rows(spans) == [0, 1, 2, 4, 8, 9]
    assert shape.real_rows([Span(0, 0, 4)] * 3) == slice(12)

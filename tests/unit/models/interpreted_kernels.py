"""Triton's kernels by its interpreter, against PyTorch's operators; run by `test_triton_kernels`.

Equal bits are asked for where both round one exact value: sums and stored values. Elsewhere the order of sums and the
last bit of an exponential differ: in float32 a few last bits, in half precision one value in a thousand by one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from dflash_serve import SamplingParams
from dflash_serve.checkpoint.config import AttentionKind, RopeConfig
from dflash_serve.checkpoint.target_config import TargetConfig
from dflash_serve.models import fused, triton_kernels
from dflash_serve.models.attention import PlainOperators
from dflash_serve.models.fused import FastLayer, FusedDrafter
from dflash_serve.models.kv_cache import KVCache
from dflash_serve.models.layers import RotaryEmbedding, rotate
from dflash_serve.models.loader import load_drafter
from dflash_serve.models.target import TargetLayer
from dflash_serve.models.triton_kernels import TritonAttention, TritonOperators, difference
from tests.support.device_calls import Graph, capture_passes
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes
from tests.support.tiny import write_tiny_drafter
from tests.support.tiny_target import write_tiny_pair

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 8, 17)
HEADS, KV_HEADS = 6, 2
CPU = torch.device("cpu")
# Kernels of a decoder layer in a padded pass in bfloat16: PyTorch's alone, and with Triton's. Five of each are SDPA's.
TARGET_LAYER = {"without q/k norm": (21, 13), "with q/k norm": (27, 13)}
DRAFTER_LAYER = (27, 14)


@pytest.fixture(autouse=True)
def rounds_to_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter truncates float32 to bfloat16, where its compiler rounds to the nearest, as PyTorch does."""
    cast = InterpreterBuilder.cast_impl

    def rounded(builder: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, dtype)
        numbers = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(numbers.view(torch.uint16).numpy().reshape(source.data.shape), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random_norm(size: int, dtype: torch.dtype) -> nn.RMSNorm:
    norm = nn.RMSNorm(size, 1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    return norm


def assert_near(found: Tensor, expected: Tensor, last_bits: float) -> None:
    """`last_bits`: the largest error, relative, and absolute at values of about 1."""
    bound = last_bits * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    if expected.dtype != torch.float32:
        assert (found != expected).sum() <= max(2, 0.001 * expected.numel())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [64, 570, 5120])
@torch.inference_mode()
def test_norm_and_swiglu(size: int, rows: int, dtype: torch.dtype) -> None:
    ours, plain, norm = TritonOperators(), PlainOperators(), random_norm(size, dtype)
    h, delta = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype)
    before = h.clone()
    for added in (None, delta):
        found, expected = ours.add_norm(h, added, norm), plain.add_norm(h, added, norm)
        assert torch.equal(found[0], expected[0])
        assert_near(found[1], expected[1], 8 if dtype == torch.float32 else 1)
    assert torch.equal(h, before)
    gate_up = 3 * torch.randn(rows, 2 * size).to(dtype)
    product = ours.silu_product(gate_up)
    assert_near(product, plain.silu_product(gate_up), 8 if dtype == torch.float32 else 1)
    assert torch.equal(product[-1:], ours.silu_product(gate_up[-1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("normed", [True, False], ids=["with q/k norm", "without q/k norm"])
@torch.inference_mode()
def test_rotation_and_storage(dim: int, rows: int, dtype: torch.dtype, normed: bool) -> None:
    entries = torch.tensor([[2, 9]])[:, 0]  # a column of a table, as in a pass
    positions = 3 + torch.arange(rows)
    cos, sin = RotaryEmbedding(RopeConfig(), dim, 64)(100 * positions)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * dim).to(dtype)
    norms = [random_norm(dim, dtype), random_norm(dim, dtype)] if normed else None
    mine = KVCache(layers=2, entries=3, kv_heads=KV_HEADS, capacity=21, head_dim=dim, dtype=dtype)
    mine.keys.zero_(), mine.values.zero_()  # all rows are compared
    theirs = deepcopy(mine)
    kinds = [AttentionKind()] * 2
    attention = TritonAttention(mine, entries, positions[None], 21, kinds, HEADS)
    queries = attention.store(1, qkv, cos, sin, norms)
    q, k, v = qkv.view(rows, -1, dim).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    theirs.write_rows(1, entries.expand(rows), positions, rotate(k, cos, sin), v)
    assert torch.equal(mine.values, theirs.values)
    # A norm that is rounded the other way moves both halves of a head.
    for found, expected in ((queries, rotate(q, cos, sin)), (mine.keys, theirs.keys)):
        assert_near(found, expected, 32 if dtype == torch.float32 else 4)


ODD = TargetConfig(
    model_type="qwen3",
    vocab_size=8,
    hidden_size=150,
    intermediate_size=1100,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=96,
    layers=(AttentionKind(causal=True),),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_on_the_device_finds_no_difference(dtype: torch.dtype) -> None:
    assert difference(ODD, dtype, CPU) is None


@pytest.mark.parametrize("kernel", triton_kernels.KERNELS)
def test_it_finds_a_kernel_that_does_nothing(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = triton_kernels.launch

    def lost(name: str, *given: Any, **named: Any) -> None:
        if name != kernel:
            launch(name, *given, **named)

    monkeypatch.setattr(triton_kernels, "launch", lost)
    assert "differs from PyTorch's in torch.float32 on cpu" in (difference(ODD, torch.float32, CPU) or "")


def test_it_finds_other_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Triton's interpreter as it is
    assert difference(ODD, torch.bfloat16, CPU) is not None


class Launches(TorchDispatchMode):
    """Counts what a GPU launches: PyTorch's operators but for views and allocations, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in str(func) or "_unsafe_view" in str(func))
        return func(*args, **(kwargs or {}))


class OneKernel(TorchFunctionMode):
    """Counts norms and attention, which are several operators on a CPU and one kernel on a GPU."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.rms_norm, F.scaled_dot_product_attention):
            return func(*args, **(kwargs or {}))
        self.launches.count += 1
        with _disable_current_modes():
            return func(*args, **(kwargs or {}))


def launches(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> tuple[int, Any]:
    """The number of kernels that the work launches on a GPU, and the result of the work."""
    launch, found = triton_kernels.launch, Launches()

    def counted(*given: Any, **named: Any) -> None:
        found.count += 1
        with _disable_current_modes():
            launch(*given, **named)

    with monkeypatch.context() as patch, torch.no_grad(), found, OneKernel(found):
        patch.setattr(triton_kernels, "launch", counted)
        out = work()
    return found.count, out


def padded_rows(operators: PlainOperators, config: Any) -> tuple[Tensor, ...] | Any:
    """cos, sin and padded attention of two requests with four rows each."""
    positions, table = torch.arange(4).expand(2, 4) + 3, torch.tensor([[1, 3], [0, 3]])
    cache = KVCache.of(config, 2, 32, torch.bfloat16)
    cache.keys.zero_(), cache.values.zero_()  # the rows before these are read, too
    attend = operators.padded(cache, table[:, 0], positions, 32, config.layers, config.num_attention_heads)
    rotary = RotaryEmbedding(config.rope, config.head_dim, 64)
    return *rotary(positions.reshape(-1)), attend


@pytest.mark.parametrize("kind", TARGET_LAYER)
def test_a_target_layer_launches_half_as_many_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ODD.model_copy(update={"qk_norm": kind == "with q/k norm"})
    layer = TargetLayer(config, 0).bfloat16().requires_grad_(False)
    h, delta = torch.randn(2, 8, config.hidden_size, dtype=torch.bfloat16)
    counts, outs = zip(
        *(
            launches(monkeypatch, partial(layer, h, delta, *padded_rows(made, config), made))
            for made in (PlainOperators(), TritonOperators())
        ),
        strict=True,
    )
    assert counts == TARGET_LAYER[kind]
    torch.testing.assert_close(outs[1], outs[0], rtol=3e-2, atol=3e-2)


def test_a_drafter_layer_launches_half_as_many_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = FusedDrafter(load_drafter(write_tiny_drafter(tmp_path), dtype=torch.bfloat16), compiled=False)
    ours, h = TritonOperators(), torch.randn(8, drafter.config.hidden_size, dtype=torch.bfloat16)
    pairs = [(PlainOperators(), drafter.layers[0]), (ours, FastLayer(drafter.layers[0], ours))]
    counts, outs = zip(
        *(launches(monkeypatch, partial(layer, h, *padded_rows(made, drafter.config), 4)) for made, layer in pairs),
        strict=True,
    )
    assert counts == DRAFTER_LAYER
    torch.testing.assert_close(outs[1], outs[0], rtol=3e-2, atol=3e-2)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Launches are a part of the passes that `capture_passes` records; their names."""
    launch, names = triton_kernels.launch, set[str]()

    def noted(name: str, *given: Any, **named: Any) -> None:
        names.add(name)
        graphs = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Graph)]
        with _disable_current_modes():
            launch(name, *given, **named)
        for graph in graphs:
            graph.record(launch, name, *given, **named)

    monkeypatch.setattr(triton_kernels, "launch", noted)
    yield names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_captured_step_gives_the_plain_tokens_and_caches(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = write_tiny_pair(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    monkeypatch.setattr(fused, "pack_linears", lambda *_, **__: None)  # as on a GPU, and so is the next one
    tokens, caches = [], []
    for triton in (False, True):
        engine = with_passes(tiny_engine(folders, dtype=dtype, max_batch_size=2), static=True)
        scheduler, speculator = engine.scheduler, engine.scheduler.speculator
        assert speculator is not None
        speculator.drafter = FusedDrafter(
            speculator.drafter, compiled=False, operators=TritonOperators() if triton else None
        )
        if triton:
            scheduler.target.operators = TritonOperators()
            capture_passes(monkeypatch)
        with recorded(monkeypatch) as names:
            tokens.append([one.token_ids for one in answers(engine, PROMPTS[:2], params)])
        assert names == (set(triton_kernels.KERNELS) if triton else set())
        caches.append((scheduler.cache.keys, scheduler.cache.values, speculator.cache.keys, speculator.cache.values))
    assert tokens[1] == tokens[0]
    assert all(work.graph is not None for work in scheduler.target_runner.captured.values())
    if dtype == torch.float32:  # in half precision a layer passes on what another rounded the other way
        torch.testing.assert_close(caches[1], caches[0], rtol=1e-4, atol=1e-4)

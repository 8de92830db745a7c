"""Our drafters behind TensorRT-LLM's worker draft as the core does, whole or cut over ranks, plain or quantised."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import Format, dequantized
from dflash_serve.checkpoint.quantization import Quantization
from dflash_serve.checkpoint.reader import assemble
from dflash_serve.errors import UserError
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.plugin import drafter as plugin
from dflash_tensorrt_llm.plugin.drafter import Layout, PlugInDrafter, build_dequantised, read_draft_folder
from tests.support.fake_tensorrt_llm import FOLDER
from tests.support.fake_tensorrt_llm.drafting import (
    FakeTarget,
    Pretrained,
    attention,
    by_core,
    by_worker,
    logits_processor,
    plug_in,
)
from tests.support.tiny import (
    FULL,
    SLIDING,
    SLIDING_BOTH_WAYS,
    quantized_state,
    random_tensors,
    tiny_drafter_config,
)
from tests.unit.tensorrt_llm.conftest import tiny_deployment

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "windowed, then full": {"layers": (SLIDING, FULL)},
    "windowed both ways": {"layers": (SLIDING_BOTH_WAYS, FULL)},
    "biases": {"attention_bias": True},
    "scaled": {"embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcap": 5.0},
    "a mask embedding": {"has_mask_embedding": True, "mask_token_id": None},
}
WIDE = tiny_drafter_config(intermediate_size=64)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("dtype", "batch", "bound"), [(torch.float32, 3, 2e-5), (torch.bfloat16, 8, 1e-3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_drafts_as_the_core_does(shape: str, dtype: torch.dtype, batch: int, bound: float) -> None:
    """Not bit for bit: some CPUs' libraries sum products of other row counts, and of columns, in another order."""
    config = tiny_drafter_config(**SHAPES[shape])
    weights, target = random_tensors(config, dtype=dtype), FakeTarget(config, dtype)
    ours = by_worker(plug_in(config, weights, dtype, target), batch, dtype)
    assert relative(ours, by_core(config, weights, batch, dtype, target)) < bound


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_features_out_of_order_are_put_in_order_by_the_draft_folder(scale: float, tmp_path: Path) -> None:
    """Upstream's drafter runs the first, ours the second, whose embeddings are scaled."""
    config = tiny_drafter_config(target_layer_ids=(5, 1, 3), embedding_scale=scale)
    TensorRTLLMBackend().launch(tiny_deployment(tmp_path, config)).prepare(tmp_path / "out")
    found, _ = read_draft_folder(tmp_path / "out" / "draft")
    written = widened(load_file(tmp_path / "out" / "draft" / "model.safetensors"))
    target, weights = FakeTarget(config, torch.float32), widened(random_tensors(config, dtype=torch.bfloat16))
    if scale == 1.0:
        upstream = importlib.import_module("tensorrt_llm._torch.models.modeling_dflash").DFlashForCausalLM
        ours = drafts(upstream(Of(pretrained_config=Pretrained(found))), written, target, config)
    else:
        ours = by_worker(plug_in(found, written, torch.float32, target), 3, torch.float32, config)
    torch.testing.assert_close(ours, by_core(config, weights, 3, torch.float32, target), rtol=1e-5, atol=2e-5)


def test_a_missing_or_unknown_tensor_is_an_error_and_not_a_poor_draft() -> None:
    config = tiny_drafter_config()
    weights = random_tensors(config)
    with pytest.raises(UserError, match="not part of a DFlash drafter"):
        PlugInDrafter(config, attention=attention()).load_weights({**weights, "extra": torch.zeros(1)})
    del weights["fc.weight"]
    with pytest.raises(UserError, match=r"fc.weight \[.*\] is missing"):
        PlugInDrafter(config, attention=attention()).load_weights(weights)


def test_a_drafter_that_does_not_split_is_refused() -> None:
    with pytest.raises(UserError, match="over 3 devices"):
        PlugInDrafter(tiny_drafter_config(), attention=attention(), layout=Layout(0, 3))


@pytest.mark.parametrize("format", [None, "fp8", "nvfp4"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sharded_over_ranks_equals_the_core(size: int, format: Format | None) -> None:
    """4 heads and 2 K/V heads: on 4 ranks, K/V heads are shared by neighbours. A rank is a thread."""
    config = tiny_drafter_config(intermediate_size=64, layers=(SLIDING, FULL), attention_bias=True)
    state = grown_state(config, format) if format else random_tensors(config)
    target, barrier, parts = FakeTarget(config, torch.float32), threading.Barrier(size), dict[int, Tensor]()

    def all_reduce(rank: int, part: Tensor) -> Tensor:
        parts[rank] = part
        barrier.wait(60)
        total = torch.stack([parts[each] for each in range(size)]).sum(0)
        barrier.wait(60)
        return total

    def of_rank(rank: int) -> Tensor:
        reduce: Callable[[Tensor], Tensor] | None = partial(all_reduce, rank) if size > 1 else None
        return by_worker(
            plug_in(config, state, torch.float32, target, format=format, layout=Layout(rank, size), reduce=reduce),
            4, torch.float32,
        )  # fmt: skip

    core = by_core(config, dequantized(assemble(state, config, format), torch.float32), 4, torch.float32, target)
    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(of_rank, range(size)):
            assert relative(found, core) < 2e-5


def grown_state(config: DrafterConfig, format: Format, *, factor: float = 1.0, fused: bool = True) -> dict[str, Tensor]:
    """Layers and projections differ much in size: without their scales, nothing would fit."""
    grown = {
        name: tensor * factor * (4.0 if "v_proj" in name else 1.0) * (3.0 if ".1." in name else 1.0)
        for name, tensor in random_tensors(config).items()
    }
    return quantized_state(grown, format, torch.tensor(0.01), fused=fused)


def dequantised(format: Format, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(plugin, "read_draft_folder", lambda folder: (WIDE, Quantization(format, ())))
    spec = Of(attention_backend="VANILLA", speculative_model="/nowhere")
    mapping = Of(tp_size=1, tp_rank=0, rank=0, enable_attention_dp=False)
    return build_dequantised(Of(spec_config=spec, mapping=mapping), Of(pretrained_config=Pretrained(WIDE)))


def drafts(drafter: Any, state: dict[str, Tensor], target: FakeTarget, original: DrafterConfig | None = None) -> Tensor:
    drafter.load_weights(state)
    drafter.load_weights_from_target_model(target)
    drafter.logits_processor = logits_processor
    return by_worker(drafter, 3, torch.float32, original)


def distance(drafter: Any, state: dict[str, Tensor], format: Format) -> float:
    target = FakeTarget(WIDE, torch.float32)
    weights = dequantized(assemble(state, WIDE, format), torch.float32)
    return relative(drafts(drafter, state, target), by_core(WIDE, weights, 3, torch.float32, target))


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_upstreams_drafter_with_our_context_drafts_as_the_core_does(
    format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused FP8 weights are rounded again: with shared scales that changes nothing. Loading again starts anew."""
    drafter = dequantised(format, monkeypatch)
    assert drafter.config.architectures == ["DFlashDraftModel"]
    for factor in (1.0, -2.0):
        assert distance(drafter, grown_state(WIDE, format, factor=factor), format) < 1e-4


def test_upstream_does_not_load_fused_nvfp4_parts_with_scales_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="weight_scale_2 should be same for all the weights"):
        dequantised("nvfp4", monkeypatch).load_weights(grown_state(WIDE, "nvfp4", fused=False))

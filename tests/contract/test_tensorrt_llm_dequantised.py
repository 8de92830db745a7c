"""A quantised drafter on TensorRT-LLM's own path: the context K/V has its scales, which upstream's own leaves out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.checkpoint.formats import Format, dequantized
from dflash_serve.checkpoint.reader import assemble
from dflash_serve.checkpoint.tensors import Quantization
from dflash_serve.errors import UserError
from dflash_tensorrt_llm.plugin import dequantised
from dflash_tensorrt_llm.plugin.weights import Layout, context_weight
from tests.support.fake_tensorrt_llm import FOLDER
from tests.support.fake_tensorrt_llm.drafting import FakeTarget, Pretrained, by_core, by_worker, logits_processor
from tests.support.tiny import quantized_state, random_tensors, tiny_drafter_config

CONFIG = tiny_drafter_config(intermediate_size=64)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def quantised_state(format: Format, growth: float = 1.0, *, fused: bool = True) -> dict[str, Tensor]:
    """Layers and projections differ much in size: without their scales, nothing would fit."""
    grown = {
        name: tensor * (4.0 if "v_proj" in name else 1.0) * (3.0 if ".1." in name else 1.0) * growth
        for name, tensor in random_tensors(CONFIG).items()
    }
    return quantized_state(grown, format, torch.tensor(0.01), fused=fused)


def configs(*, rank: int = 0, size: int = 1, data: bool = False) -> tuple[Any, Any]:
    mapping = Of(tp_size=size, tp_rank=rank, rank=rank, enable_attention_dp=data)
    spec = Of(attention_backend="VANILLA", speculative_model="/nowhere")
    return Of(spec_config=spec, mapping=mapping), Of(pretrained_config=Pretrained(CONFIG))


def built(format: Format, monkeypatch: pytest.MonkeyPatch, **mapping: Any) -> Any:
    found = (CONFIG, Quantization(format, ()))
    monkeypatch.setattr(dequantised, "read_draft_folder", lambda folder: found)
    return dequantised.build(*configs(**mapping))


def drafts(drafter: Any, state: dict[str, Tensor], target: FakeTarget) -> Tensor:
    drafter.load_weights(state)
    drafter.load_weights_from_target_model(target)
    drafter.logits_processor = logits_processor
    return by_worker(drafter, 3, torch.float32)


def distance(found: Tensor, state: dict[str, Tensor], format: Format, target: FakeTarget) -> float:
    weights = dequantized(assemble(state, CONFIG, format), torch.float32)
    core = by_core(CONFIG, weights, 3, torch.float32, target)
    return float((found - core).norm() / core.norm())


@pytest.mark.parametrize(
    ("format", "fused", "bound"), [("fp8", True, 1e-4), ("fp8", False, 0.1), ("nvfp4", True, 1e-4)]
)
def test_it_drafts_what_the_core_drafts(
    format: Format, fused: bool, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused FP8 weights are rounded again: with shared scales that changes nothing."""
    target, state = FakeTarget(CONFIG, torch.float32), quantised_state(format, fused=fused)
    assert distance(drafts(built(format, monkeypatch), state, target), state, format, target) < bound


def test_upstream_does_not_load_fused_nvfp4_parts_with_scales_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="weight_scale_2 should be same for all the weights"):
        built("nvfp4", monkeypatch).load_weights(quantised_state("nvfp4", fused=False))


def test_upstreams_own_forgets_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there is a subclass at all."""
    upstream = importlib.import_module("tensorrt_llm._torch.models.modeling_dflash").DFlashForCausalLM
    target, state = FakeTarget(CONFIG, torch.float32), quantised_state("fp8")
    assert distance(drafts(upstream(configs()[1]), state, target), state, "fp8", target) > 0.3
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        drafts(upstream(configs()[1]), quantised_state("nvfp4"), target)


def test_weights_that_are_loaded_again_make_the_product_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, target = built("nvfp4", monkeypatch), FakeTarget(CONFIG, torch.float32)
    drafts(drafter, quantised_state("nvfp4"), target)
    again = quantised_state("nvfp4", growth=-2.0)
    assert distance(drafts(drafter, again, target), again, "nvfp4", target) < 1e-4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_the_rows_of_its_heads(size: int) -> None:
    """4 heads, 2 K/V heads: on 4 ranks neighbours share one, as upstream repeats them."""
    whole = assemble(quantised_state("fp8"), CONFIG, "fp8")
    full = context_weight(whole, CONFIG, Layout(), torch.float32).view(CONFIG.num_layers, 2, 2, -1)
    for rank in range(size):
        mine = context_weight(whole, CONFIG, Layout(rank, size), torch.float32)
        heads = range(rank * 2 // size, max(rank * 2 // size + 1, (rank + 1) * 2 // size))
        assert torch.equal(mine, full[:, :, list(heads)].reshape(mine.shape))


def test_a_missing_scale_is_an_error_and_not_a_poor_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    state = quantised_state("fp8")
    del state["layers.1.self_attn.k_proj.weight_scale"]
    with pytest.raises(UserError, match="weight_scale"):
        built("fp8", monkeypatch).load_weights(state)


def test_the_drafter_keeps_its_own_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built("fp8", monkeypatch).config.architectures == ["DFlashDraftModel"]

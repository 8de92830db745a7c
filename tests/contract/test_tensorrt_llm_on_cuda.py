"""The plug-in's CUDA path without CUDA: on a device without data, at the sizes of a published drafter.

Shown: every operator's shapes, dtypes and alignment rules, that all of it lives on the device, and that nothing waits
for the host. Not shown, never run on a GPU: the numbers, and attention itself, of which only the call is checked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig, expected_tensors
from dflash_serve.checkpoint.formats import Format
from dflash_serve.checkpoint.reader import assemble
from dflash_serve.errors import UserError
from dflash_tensorrt_llm.plugin.drafter import PlugInDrafter
from dflash_tensorrt_llm.plugin.weights import Layout, context_weight
from tests.support.fake_cuda import DEVICE, OnTheDevice
from tests.support.tiny import SLIDING, tiny_drafter_config

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "block_size": 16, "target_layer_ids": (1, 9, 17, 25, 33), "num_target_layers": 36,
    "vocab_size": 151936, "mask_token_id": 151669, "max_position_embeddings": 40960,
}  # fmt: skip
FORMATS: list[Format | None] = [None, "fp8", "nvfp4"]
BATCH, CONTEXT = 4, 512


def config_of(**overrides: Any) -> DrafterConfig:
    return tiny_drafter_config(**{**QWEN3_8B, **overrides})


def stored(config: DrafterConfig, format: Format | None) -> dict[str, Tensor]:
    """A checkpoint as the loader hands it over, without its bytes."""
    with torch.device(DEVICE):
        return _stored(config, format)


def _stored(config: DrafterConfig, format: Format | None) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        module, one = name.removesuffix(".weight"), torch.empty((), dtype=torch.float32)
        if format is None or not name.endswith("_proj.weight"):
            state[name] = torch.empty(shape, dtype=torch.bfloat16)
        elif format == "fp8":
            state[name] = torch.empty(shape, dtype=torch.float8_e4m3fn)
            state |= {f"{module}.weight_scale": one, f"{module}.input_scale": one}
        else:
            state[name] = torch.empty((shape[0], shape[1] // 2), dtype=torch.uint8)
            state[f"{module}.weight_scale"] = torch.empty((shape[0], shape[1] // 16), dtype=torch.float8_e4m3fn)
            state |= {f"{module}.weight_scale_2": one, f"{module}.input_scale": one}
    return state


def attention(*, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
    """flash-attn's own demands on its arguments."""
    assert {t.dtype for t in (q, k_cache, v_cache, k, v)} == {torch.bfloat16}
    assert all(t.stride(-1) == 1 and t.device.type == DEVICE for t in (q, k_cache, v_cache, k, v))
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[2] % k.shape[2] == 0
    assert k_cache.shape[2:] == k.shape[2:]
    assert rest["cache_seqlens"].dtype == rest["cache_batch_idx"].dtype == torch.int32
    return torch.empty_like(q)


def loaded(config: DrafterConfig, format: Format | None, layout: Layout, sums: list[Tensor]) -> PlugInDrafter:
    def reduce(partial: Tensor) -> Tensor:
        sums.append(partial)
        return partial.clone()

    drafter = PlugInDrafter(
        config, format=format, layout=layout, reduce=reduce if layout.size > 1 else None, attention=attention,
        device=DEVICE,
    )  # fmt: skip
    drafter.load_weights(stored(config, format))
    drafter._build_fused_kv_buffers()
    return drafter


def step(drafter: PlugInDrafter) -> tuple[Tensor, Tensor, Tensor]:
    """New context K/V of BATCH blocks, and their hidden states, as DFlashWorker calls for them."""
    config, rows = drafter.config, BATCH * drafter.config.block_size
    with torch.device(DEVICE), OnTheDevice(), torch.inference_mode():
        features = torch.empty(rows, config.feature_size, dtype=torch.bfloat16)
        k, v = drafter.precompute_context_kv(drafter.project_target_hidden(features), torch.arange(rows))
        shape = (BATCH + 1, config.num_layers, CONTEXT + config.block_size, drafter._num_kv_heads, config.head_dim)
        hidden = drafter.dflash_forward(
            noise_embedding=torch.empty(BATCH, config.block_size, config.hidden_size, dtype=torch.bfloat16),
            query_positions=torch.arange(rows).view(BATCH, -1),
            num_ctx_per_req=torch.ones(BATCH, dtype=torch.long),
            ctx_k_cache=torch.empty(shape, dtype=torch.bfloat16),
            ctx_v_cache=torch.empty(shape, dtype=torch.bfloat16),
            ctx_cache_batch_idx=torch.arange(BATCH),
        )
    return k, v, hidden


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_a_step_stays_on_the_device_at_every_format_and_size(format: Format | None, size: int) -> None:
    config, sums = config_of(layers=(SLIDING, tiny_drafter_config().layers[0])), list[Tensor]()
    drafter = loaded(config, format, Layout(size - 1, size), sums)
    assert {t.device.type for t in [*drafter.parameters(), *drafter.buffers()]} == {DEVICE}
    k, v, hidden = step(drafter)
    heads = max(1, config.num_key_value_heads // size)
    assert k.shape == v.shape == (BATCH * 16, config.num_layers, heads, 128)
    assert hidden.shape == (BATCH * 16, config.hidden_size)
    assert {t.dtype for t in (k, v, hidden)} == {torch.bfloat16}
    assert len(sums) == (0 if size == 1 else 2 * config.num_layers)
    kept = torch.float8_e4m3fn if format == "fp8" else torch.bfloat16
    attention_of_first: Any = drafter.drafter.layers[0].self_attn  # type: ignore[union-attr]
    assert attention_of_first.q_proj.weight.dtype == kept


def test_fp8_sides_that_no_kernel_takes_are_found_here() -> None:
    """8 K/V rows a device: CUDA's `_scaled_mm` wants multiples of 16, and the checks refuse it before launch."""
    config = config_of(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    with pytest.raises(RuntimeError, match="16"):
        step(loaded(config, "fp8", Layout(0, 2), []))


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_the_rows_for_upstreams_fused_product_are_bf16_and_this_ranks(format: Format, size: int) -> None:
    config = config_of()
    rows = context_weight(assemble(stored(config, format), config, format), config, Layout(0, size), torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    assert rows.shape == (config.num_layers * 2 * (8 // size) * 128, 4096)
    assert rows.is_contiguous()


def test_a_wait_for_the_host_would_be_found() -> None:
    for wait in (Tensor.cpu, Tensor.tolist, lambda t: t.sum().item(), lambda t: bool(t.any())):
        with OnTheDevice(), pytest.raises((NotImplementedError, RuntimeError)):
            wait(torch.empty(2, device=DEVICE))
    with OnTheDevice(), pytest.raises(AssertionError, match="mixes tensors of host and device"):
        torch.empty(2, 3, device=DEVICE)[torch.tensor([0, 1])]


def test_what_does_not_split_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(UserError, match="over 3 devices"):
        PlugInDrafter(config_of(), attention=attention, layout=Layout(0, 3))

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
from dflash_serve.checkpoint.storage import Scheme
from dflash_serve.checkpoint.tensors import stored_tensors
from dflash_tensorrt_llm.plugin.drafter import Layout, PlugInDrafter
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
    products = [name.removesuffix(".weight") for name in expected_tensors(config) if name.endswith("_proj.weight")]
    quantised = products if format else []
    weights = {f"{name}.weight": torch.uint8 if format == "nvfp4" else torch.float8_e4m3fn for name in quantised}

    def dtype(name: str, shape: tuple[int, ...]) -> torch.dtype:
        if name.endswith("_scale") or name.endswith("_scale_2"):
            return torch.float8_e4m3fn if shape else torch.float32
        return weights.get(name, torch.bfloat16)

    with torch.device(DEVICE):
        leaves = stored_tensors(config, {module: Scheme(format) for module in quantised if format})
        return {name: torch.empty(leaf.shape, dtype=dtype(name, leaf.shape)) for name, leaf in leaves.items()}


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


def test_a_wait_for_the_host_would_be_found() -> None:
    for wait in (Tensor.cpu, Tensor.tolist, lambda t: t.sum().item(), lambda t: bool(t.any())):
        with OnTheDevice(), pytest.raises((NotImplementedError, RuntimeError)):
            wait(torch.empty(2, device=DEVICE))
    with OnTheDevice(), pytest.raises(AssertionError, match="mixes tensors of host and device"):
        torch.empty(2, 3, device=DEVICE)[torch.tensor([0, 1])]

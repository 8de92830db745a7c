"""What the embedded engine records into its CUDA graphs, on a device without data: one decoding step.

Shown: that target and drafter passes and what follows stay on the device and never wait for the host, without which no
graph could hold them. Not shown: the capture itself, and any number (`tests/gpu` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig
from dflash_serve.checkpoint.target_config import TargetConfig
from dflash_serve.models.attention import PromptAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import Span
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.params import SamplingParams
from dflash_torch.block_step import BlockSteps
from dflash_torch.model_runner import DrafterRunner, TargetRunner
from dflash_torch.request import LaunchedStep, Request
from dflash_torch.sampler import Sampler
from dflash_torch.speculator import Speculator
from tests.support.fake_cuda import DEVICE, OnTheDevice
from tests.support.tiny import FULL, SLIDING, tiny_drafter_config

SPANS = [Span(3, 40, 4), Span(0, 7, 2), Span(1, 100, 4)]
"""Three requests: entry, tokens so far, rows of this step."""


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with torch.inference_mode():
        yield


def on_cuda(make: Callable[[], Any]) -> Any:
    """A module in bf16; its frequencies stay in fp32, and are made on the host."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            module = make()
    finally:
        torch.set_default_dtype(torch.float32)
    module.rotary.to(DEVICE)
    return module.eval().requires_grad_(False)


def target() -> TargetModel:
    config = TargetConfig(
        model_type="qwen3", vocab_size=96, hidden_size=32,
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        layers=(AttentionKind(causal=True),) * 8, rms_norm_eps=1e-6, max_position_embeddings=256,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False, qk_norm=True,
    )  # fmt: skip
    found: TargetModel = on_cuda(lambda: TargetModel(config))
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_steps_are_launched_behind_one_another_without_the_host(width: int, temperature: float) -> None:
    """A first step; the next one of the same requests; one without the first of them and with a new one."""
    config, model = tiny_drafter_config(layers=(SLIDING, FULL)), target()
    drafter: Drafter = on_cuda(lambda: Drafter(config))
    speculator = Speculator(drafter, model, block_size=config.block_size, max_batch_size=4, capacity=128)
    speculator.drafter_runner = DrafterRunner(model.embedding, speculator.cache, config.block_size, static=True)
    runner = TargetRunner(model, model.new_cache(4, 128 + config.block_size), config.block_size, static=True)
    steps, before = BlockSteps(runner, speculator, Sampler()), list[LaunchedStep]()
    params = SamplingParams(temperature=temperature, top_k=5)
    features = torch.empty(3, config.feature_size, dtype=torch.bfloat16, device=DEVICE)
    requests = [Request(n, n, [5, 6, 7, 9], 3, 100, params, verified=3, features=[features]) for n in range(4)]
    with OnTheDevice():
        for chosen in (requests[:3], requests[:3], requests[1:]):
            before = steps.launch(chosen, {each.id: width for each in chosen}, before, config.target_layer_ids)
            for step in before:
                steps.choose(step)
            fetched = [step.tokens for step in before if step.tokens is not None]
            assert sum(len(each.host) for each in fetched) == 3
            assert all(each.host.shape[1] > width for each in fetched)
            assert {each.host.device.type for each in fetched} | {runner.state.device.type} == {DEVICE}


def test_prompts_of_different_lengths_attend_on_the_device() -> None:
    model = target()
    cache = model.new_cache(4, 256)
    with OnTheDevice():
        attend = PromptAttention(cache, SPANS, model.config.layers, 4)
        q, k, v = (torch.empty(10, heads, 16, dtype=torch.bfloat16, device=DEVICE) for heads in (4, 2, 2))
        assert attend(0, q, k, v).shape == (10, 4, 16)

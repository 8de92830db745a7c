"""The exported form of the drafter computes what the core computes; needs no exporter."""

from __future__ import annotations

import pytest
import torch

from dflash_engines.onnx_export import Block, block_inputs, dense_mask
from dflash_engines.sample import Sample, by_core
from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, random_tensors, tiny_drafter_config


def drafter_and_sample(*kinds: AttentionKind, **overrides: object) -> tuple[Drafter, Sample]:
    """Blocks with 1, 9 and 20 context tokens."""
    config = tiny_drafter_config(layers=kinds, **overrides)
    drafter = Drafter(config)
    drafter.load_state_dict(random_tensors(config))
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(24, config.feature_size, generator=generator)
    noise = torch.randn(3, config.block_size, config.hidden_size, generator=generator)
    return drafter.eval(), Sample(features, noise, (1, 9, 20))


KINDS = {
    "full": FULL,
    "windowed": SLIDING,
    "windowed both ways": SLIDING_BOTH_WAYS,
    "causal": AttentionKind(causal=True),
}


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_with_ragged_contexts_equal_the_cores(kind: str, bias: bool) -> None:
    drafter, sample = drafter_and_sample(KINDS[kind], KINDS[kind], attention_bias=bias)
    hidden, k, v = by_core(drafter, sample)
    found = Block(drafter)(*block_inputs(drafter, sample, k, v, torch.float32).values())
    torch.testing.assert_close(found, hidden, rtol=1e-5, atol=1e-5)


def test_padding_is_never_seen() -> None:
    mask = dense_mask([2, 5], 5, tiny_drafter_config())
    assert mask.shape == (2, 1, 4, 9)
    assert (mask[0, 0, :, 2:5] == -30000).all()
    assert (mask[0, 0, :, [0, 1, 5, 6, 7, 8]] == 0).all()
    assert (mask[1] == 0).all()


def test_layers_of_several_kinds_are_refused() -> None:
    drafter, _ = drafter_and_sample(FULL, SLIDING)
    with pytest.raises(UserError, match="several kinds"):
        Block(drafter)

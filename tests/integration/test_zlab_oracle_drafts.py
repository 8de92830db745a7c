"""Our drafter against z-lab's own code (PyPI `dflash` 0.1.0, test-only): the same file, the same drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.loader import load_drafter
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, tiny_drafter_config, write_tiny_drafter

zlab = pytest.importorskip("dflash.model")

pytestmark = pytest.mark.usefixtures("one_thread")

YARN = {"theta": 10000.0, "scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "theta": 5e5,
    "scaling": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, object]] = {
    "full": {},
    "sliding and full": {"layers": (SLIDING, FULL)},
    "sliding, not causal": {"layers": (SLIDING_BOTH_WAYS, FULL)},
    "window narrower than the block": {"layers": (AttentionKind(window=3), FULL), "block_size": 8},
    "causal everywhere": {"layers": (AttentionKind(causal=True), SLIDING)},
    "attention bias": {"attention_bias": True},
    "one K/V head": {"num_key_value_heads": 1},
    "one feature, five layers": {"target_layer_ids": (4,), "layers": (SLIDING,) * 4 + (FULL,)},
    "yarn": {"rope": YARN},
    "llama3 rope": {"rope": LLAMA3},
    "linear rope": {"rope": {"theta": 10000.0, "scaling": "linear", "factor": 2.0}},
}
STEPS = (17, 1, 4, 2, 3, 1, 4)
"""New context rows of each step: the prompt's, then what a step of B = 4 can commit."""


class Ours:
    """Drafts with a KVCache."""

    def __init__(self, drafter: Drafter) -> None:
        config = drafter.config
        self.drafter, self.length = drafter, 0
        self.cache = KVCache.of(config, 1, 64)

    def draft(self, features: Tensor, noise: Tensor) -> Tensor:
        """features [new, F*H], noise [B, H] -> hidden states [B, H]."""
        span = Span(0, self.length, len(features))
        context = self.drafter.project_context(features)
        self.cache.write_all([span], *self.drafter.context_kv(context, span_positions([span])))
        self.length += len(features)
        block = Span(0, self.length, len(noise))
        config = self.drafter.config
        attend = RaggedAttention(self.cache, [block], config.layers, config.num_attention_heads)
        out: Tensor = self.drafter(noise, span_positions([block]), attend)
        return out


class Theirs:
    """Drafts as `dflash_generate` does."""

    def __init__(self, folder: Path) -> None:
        self.model = zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
        self.cache, self.length = zlab._make_cache(self.model.config), 0

    def draft(self, features: Tensor, noise: Tensor) -> Tensor:
        positions = torch.arange(self.length, self.length + len(features) + len(noise))
        self.length += len(features)
        out: Tensor = self.model(
            target_hidden=features[None],
            noise_embedding=noise[None],
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        zlab._crop_to(self.cache, self.length)
        return out[0]


def steps(config: DrafterConfig, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Random features and block inputs of growing contexts."""
    generator = torch.Generator().manual_seed(seed)
    for rows in STEPS:
        yield (
            torch.randn(rows, config.feature_size, generator=generator),
            torch.randn(config.block_size, config.hidden_size, generator=generator),
        )


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_drafts_equal_zlabs_over_a_growing_context(case: str, tmp_path: Path) -> None:
    config = tiny_drafter_config(**CASES[case])
    folder = write_tiny_drafter(tmp_path / "drafter", config, seed=3)
    ours, theirs = Ours(load_drafter(folder)), Theirs(folder)
    head = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(2))
    for features, noise in steps(config):
        mine, reference = ours.draft(features, noise), theirs.draft(features, noise)
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5)
        logits = ours.drafter.adjust_logits(mine[1:] @ head.T)
        assert torch.equal(logits.argmax(-1), (reference[1:] @ head.T).argmax(-1))


def test_zlab_reads_our_config_as_we_do(tmp_path: Path) -> None:
    config = tiny_drafter_config(layers=(SLIDING, FULL), mask_token_id=11, block_size=6)
    theirs = Theirs(write_tiny_drafter(tmp_path / "drafter", config)).model
    assert theirs.block_size == 6
    assert theirs.mask_token_id == 11
    assert tuple(theirs.target_layer_ids) == config.target_layer_ids
    for layer, kind in zip(theirs.layers, config.layers, strict=True):
        assert layer.self_attn.sliding_window == kind.window
        assert layer.self_attn.is_causal == kind.causal


@torch.inference_mode()
def test_logit_scale_and_soft_cap_equal_zlabs(tmp_path: Path) -> None:
    config = tiny_drafter_config(output_multiplier=0.5, final_logit_softcap=3.0)
    folder = write_tiny_drafter(tmp_path / "drafter", config)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    hidden = torch.randn(3, config.hidden_size) * 4
    expected = zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).compute_logits(hidden, head)
    torch.testing.assert_close(load_drafter(folder).adjust_logits(head(hidden)), expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": (AttentionKind(window=7, causal=True), FULL)},
        {"layers": (SLIDING_BOTH_WAYS, FULL)},
        {"layers": (FULL, FULL)},
        {"rope": {"theta": 20000.0}},
    ],
    ids=["window off by one", "causality", "window ignored", "theta"],
)
@torch.inference_mode()
def test_this_comparison_would_see_a_wrong_reading(wrong: dict[str, object], tmp_path: Path) -> None:
    right = tiny_drafter_config(layers=(SLIDING, FULL))
    folder = write_tiny_drafter(tmp_path / "drafter", right)
    misread = Drafter(tiny_drafter_config(**{"layers": right.layers, **wrong}))
    misread.load_state_dict(load_drafter(folder).state_dict())
    ours, theirs = Ours(misread), Theirs(folder)
    worst = max(float((ours.draft(f, n) - theirs.draft(f, n)).abs().max()) for f, n in steps(right))
    assert worst > 1e-3


@pytest.mark.parametrize("case", ["sliding and full", "sliding, not causal", "attention bias", "yarn"])
def test_we_read_what_zlabs_code_saves(case: str, tmp_path: Path) -> None:
    config = tiny_drafter_config(**CASES[case])
    written = write_tiny_drafter(tmp_path / "ours", config)
    zlab.DFlashDraftModel.from_pretrained(written, dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    back = load_drafter(tmp_path / "theirs")
    assert back.config == config
    for name, tensor in load_drafter(written).state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)

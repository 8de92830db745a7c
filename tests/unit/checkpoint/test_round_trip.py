"""A drafter survives every chain of dialects unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.checkpoint.reader import DIALECTS, load_tensors, open_checkpoint, parse
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import Problem, UserError
from tests.support.heads import HEADS
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, random_tensors, tiny_drafter_config

ROPES: list[dict[str, object]] = [
    {"theta": 1e6},
    {"theta": 150000.0, "scaling": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"theta": 1e4, "scaling": "linear", "factor": 2.0},
    {"theta": 1e4, "scaling": "longrope", "short_factor": (1.0, 1.5), "long_factor": (2.0, 3.0)},
]


PLAIN = [name for name in DIALECTS if name not in ("specforge", "k3-dspark")]
"""SpecForge writes plain drafters as z-lab does; the dialect of Kimi-K3 writes latent attention alone."""


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    """Any drafter that all dialects can express."""
    window = draw(st.integers(1, 4096))
    uniform = st.sampled_from(
        [AttentionKind(), AttentionKind(window=window), AttentionKind(window=window, causal=True)]
    )
    kv_heads = draw(st.integers(1, 4))
    depth = draw(st.integers(4, 100))
    vocab_size = draw(st.integers(2, 300000))
    block_size = draw(st.integers(2, 32))
    return DrafterConfig(
        block_size=block_size,
        target_layer_ids=tuple(draw(st.lists(st.integers(0, depth - 1), min_size=1, max_size=8))),
        num_target_layers=draw(st.sampled_from([None, depth])),
        mask_token_id=draw(st.integers(0, vocab_size - 1)),
        vocab_size=vocab_size,
        hidden_size=draw(st.integers(1, 9000)),
        intermediate_size=draw(st.integers(1, 30000)),
        num_attention_heads=kv_heads * draw(st.integers(1, 8)),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 256)),
        layers=(draw(uniform),) * draw(st.integers(1, 8)),
        max_position_embeddings=draw(st.integers(block_size, 2**20)),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope=draw(st.sampled_from(ROPES)),
        attention_bias=draw(st.booleans()),
    )


def read_back(dialect: str, config: DrafterConfig) -> DrafterConfig:
    problems: list[Problem] = []
    back, found = parse(DIALECTS[dialect].write(config, None), Path("config.json"), problems)
    assert not problems
    assert found is not None
    assert found.name == dialect
    assert back is not None
    return back


@given(configs(), st.permutations(PLAIN))
@settings(deadline=None)
def test_any_chain_of_dialects_gives_the_same_config(config: DrafterConfig, chain: list[str]) -> None:
    back = config
    for dialect in chain:
        back = read_back(dialect, back)
    assert back == config


ALL: Mapping[str, Mapping[str, object]] = {
    **HEADS,
    "biases": {"attention_bias": True},
    "scales and a soft-cap": {"embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcap": 30.0},
    "a mask embedding": {"mask_token_id": None, "has_mask_embedding": True},
    **{
        f"mixed layers {number}": {"layers": layers}
        for number, layers in enumerate([(FULL, SLIDING), (FULL, SLIDING_BOTH_WAYS), (SLIDING, SLIDING)])
    },
}
ABLE = {"plain": 4, "anchor-first": 3, "DFlash2": 3, "biases": 4, "scales and a soft-cap": 3, "mixed layers 2": 4}
"""Number of dialects that can at least describe a drafter, where that is more than one."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_every_dialect_writes_a_drafter_so_that_it_is_read_back_or_says_that_it_cannot(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = tiny_drafter_config(**ALL[name])
    tensors, able = random_tensors(config, dtype=dtype), 0
    for dialect in DIALECTS:
        folder = tmp_path / dialect
        try:
            write_drafter(folder, config, tensors, dialect=dialect)
        except UserError as error:
            assert "has no way to write" in str(error)  # noqa: PT017 - either way is right
            assert not folder.exists()
            continue
        able += 1
        checkpoint = open_checkpoint(folder)
        assert (checkpoint.problems, checkpoint.config) == ([], config)
        back = load_tensors(checkpoint)
        assert back.keys() == tensors.keys()
        assert all(back[key].dtype == tensors[key].dtype and torch.equal(back[key], tensors[key]) for key in tensors)
    assert able >= ABLE.get(name, 1)


@pytest.mark.parametrize(
    ("dialect", "overrides", "words"),
    [
        ("speculators", {"embedding_scale": 2.0}, "an embedding scale"),
        ("speculators", {"final_logit_softcap": 30.0}, "a soft-cap"),
        ("speculators", {"layers": (AttentionKind(causal=True),)}, "full-attention layers that are causal"),
        ("speculators", {"layers": (SLIDING, SLIDING_BOTH_WAYS)}, "different causality"),
        ("speculators", {"has_mask_embedding": True}, "a mask embedding"),
        ("modelopt", {"layers": (SLIDING, FULL)}, "different"),
        ("modelopt", {"has_mask_embedding": True}, "a mask embedding"),
        ("zlab", {"layers": (SLIDING, AttentionKind(window=9, causal=True))}, r"different windows \(6, 9\)"),
        ("zlab", {"layers": (SLIDING_BOTH_WAYS, AttentionKind(causal=True))}, "some layers causal"),
    ],
)
def test_what_a_dialect_cannot_say_is_an_error_and_not_a_loss(
    dialect: str, overrides: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        DIALECTS[dialect].write(tiny_drafter_config(**overrides), None)

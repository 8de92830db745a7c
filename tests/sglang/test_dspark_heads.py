"""SGLang's own DSpark code on the CPU: it reads what we prepare as we meant it, and its Markov heads are ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from dflash_serve.checkpoint.config import MarkovConfig, MarkovKind
from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.models.drafter_heads import MarkovHead
from dflash_sglang.settings import dialect_of
from tests.support.heads import HEADS
from tests.support.tiny import tiny_drafter_config


@pytest.mark.parametrize("name", ["vanilla Markov", "vanilla Markov, fill-in", "gated Markov", "Markov and confidence"])
def test_sglang_reads_what_we_prepare_as_we_meant_it(name: str) -> None:
    from sglang.srt.speculative.dspark_components import dspark_config as theirs

    config = tiny_drafter_config(block_size=8, **HEADS[name])
    raw = DIALECTS[dialect_of(config)].write(config, None)
    given = Qwen3Config(**raw)
    found = theirs.parse_dspark_draft_config(draft_hf_config=given)
    assert config.markov is not None
    assert (found.markov_rank, found.markov_head_type) == (config.markov.rank, config.markov.kind)
    assert found.gamma == config.rows()
    assert tuple(found.target_layer_ids or ()) == config.target_layer_ids
    assert found.mask_token_id == config.mask_token_id
    assert theirs.get_dspark_sample_from_anchor(given) is (config.slots == "anchor-first")
    runtime = theirs.resolve_runtime_config(
        draft_hf_config=given, speculative_num_draft_tokens=config.block_size, target_vocab_size=config.vocab_size
    )
    assert (runtime.gamma, runtime.verify_num_draft_tokens) == (7, 8)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_sglangs_markov_heads_are_ours(kind: MarkovKind) -> None:
    from sglang.srt.models.dspark import build_markov_head

    ours = MarkovHead(MarkovConfig(kind=kind, rank=6), hidden_size=32, vocab_size=96, draft_vocabulary=96)
    theirs = build_markov_head(SimpleNamespace(markov_rank=6, markov_head_type=kind, vocab_size=96, hidden_size=32))
    theirs.load_state_dict(ours.state_dict())
    previous, hidden = torch.randint(0, 96, (5, 3)), torch.randn(5, 3, 32)
    mine, state = None, theirs.init_state(hidden[0])
    for slot in range(5):
        bias, mine = ours(previous[slot], hidden[slot], mine)
        expected, state = theirs.step_bias(previous[slot], hidden_states=hidden[slot], state=state)
        torch.testing.assert_close(bias, expected)

"""The heads of drafters against transcriptions of their equations, and against plain DFlash where they are idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter, propose
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.loader import load_drafter
from tests.support.heads import CONVOLUTION, HEADS, SELECTOR, SHIFTED, VANILLA, make_idle
from tests.support.tiny import random_tensors, tiny_drafter_config

BLOCKS, SLOTS = 3, 6
MARKOV = [name for name, fields in HEADS.items() if "markov" in fields]


def drafter_of(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> Drafter:
    dialect = "speculators" if config.draft_vocabulary else "modelopt"
    write_drafter(folder, config, tensors, dialect=dialect)
    loaded = load_drafter(folder)
    assert loaded.config == config
    return loaded


def hidden_of(config: DrafterConfig, seed: int = 5) -> Tensor:
    return torch.randn(BLOCKS, SLOTS, config.hidden_size, generator=torch.Generator().manual_seed(seed)) / 4


def head_of(config: DrafterConfig) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(2))
    return lambda hidden: hidden @ weight.T


def transcribed(
    tensors: dict[str, Tensor], config: DrafterConfig, hidden: Tensor, base: Tensor, anchor: int
) -> list[int]:
    """DSpark's draft of one block, slot by slot, from the equations: hidden [slots, H], base logits [slots, Vd]."""
    t = {name.removeprefix("markov_head."): tensor for name, tensor in tensors.items()}
    w1, w2 = t["markov_w1.weight"], t["markov_w2.weight"]
    assert config.markov is not None
    rank, state, previous, path = config.markov.rank, torch.zeros(config.markov.rank), anchor, []
    for h, u in zip(hidden, base, strict=True):
        e = w1[previous]
        if config.markov.kind == "gated":
            gate = 1 / (1 + torch.exp(-(t["gate_proj.weight"] @ torch.cat([h, e]) + t["gate_proj.bias"])))
            e = gate * e
        if config.markov.kind == "rnn":
            z = t["joint_proj.weight"] @ torch.cat([state, e, h]) + t["joint_proj.bias"]
            keep = 1 / (1 + torch.exp(-z[:rank]))
            state, e = keep * state + (1 - keep) * torch.tanh(z[rank : 2 * rank]), torch.tanh(z[2 * rank :])
        index = int((u + w2 @ e).argmax())
        previous = index + int(tensors["d2t"][index]) if "d2t" in tensors else index
        path.append(previous)
    return path


@pytest.mark.parametrize("name", MARKOV)
@torch.inference_mode()
def test_a_markov_walk_is_dsparks(name: str, tmp_path: Path) -> None:
    config = tiny_drafter_config(block_size=SLOTS + 1, **HEADS[name])
    tensors = random_tensors(config, seed=4)
    tensors["markov_head.markov_w2.weight"] *= 8  # so that the walk hangs on the tokens before
    drafter, hidden = drafter_of(tmp_path / "drafter", config, tensors), hidden_of(config)
    base = hidden @ tensors["lm_head.weight"].T if config.draft_vocabulary else head_of(config)(hidden)
    anchors = [3, 50, 95]
    expected = [transcribed(tensors, config, hidden[n], base[n], anchors[n]) for n in range(BLOCKS)]
    got = propose(drafter, head_of(config), hidden.flatten(0, 1), anchors, [SLOTS] * BLOCKS, [None] * BLOCKS)
    assert got == expected
    other = propose(drafter, head_of(config), hidden.flatten(0, 1), [4, 5, 6], [SLOTS] * BLOCKS, [None] * 3)
    assert other != expected  # the anchor matters


@pytest.mark.parametrize("name", [name for name in HEADS if name != "plain"])
@torch.inference_mode()
def test_blocks_of_different_widths_and_fused_weights_draft_the_same(name: str, tmp_path: Path) -> None:
    config = tiny_drafter_config(block_size=SLOTS + 1, **HEADS[name])
    drafter, hidden = drafter_of(tmp_path / "d", config, random_tensors(config, seed=4)), hidden_of(config)
    whole = propose(drafter, head_of(config), hidden.flatten(0, 1), [1, 2, 3], [SLOTS] * BLOCKS, [None] * BLOCKS)
    counts = [2, 6, 1]
    rows = torch.cat([hidden[n, :count] for n, count in enumerate(counts)])
    for one in (drafter, FusedDrafter(drafter)):
        parts = propose(one, head_of(config), rows, [1, 2, 3], counts, [None] * BLOCKS)
        assert parts == [tokens[:count] for tokens, count in zip(whole, counts, strict=True)]


class Only:
    """Allows some tokens in every slot."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self.allowed = allowed

    def fill(self, slots: int, choose: Callable[[Sequence[int], Tensor], int]) -> list[int]:
        draft: list[int] = []
        for _ in range(slots):
            mask = torch.zeros(96, dtype=torch.bool)
            mask[list(self.allowed)] = True
            draft.append(choose(draft, mask))
        return draft


@pytest.mark.parametrize("name", [name for name in HEADS if name != "plain"])
@torch.inference_mode()
def test_a_filter_chooses_in_every_slot_and_leaves_its_neighbours_alone(name: str, tmp_path: Path) -> None:
    config = tiny_drafter_config(block_size=SLOTS + 1, **HEADS[name])
    tensors = random_tensors(config, seed=4)
    drafter, hidden = drafter_of(tmp_path / "drafter", config, tensors), hidden_of(config).flatten(0, 1)
    draftable = (torch.arange(40) + tensors["d2t"]).tolist() if config.draft_vocabulary else list(range(96))
    allowed, counts, free = draftable[10:17], [SLOTS] * BLOCKS, [None] * BLOCKS
    without = propose(drafter, head_of(config), hidden, [1, 2, 3], counts, free)
    filtered = propose(drafter, head_of(config), hidden, [1, 2, 3], counts, [None, Only(allowed), None])
    assert set(filtered[1]) <= set(allowed)
    assert filtered[::2] == without[::2]
    everything = [Only(range(96)), Only(draftable), None]
    assert propose(drafter, head_of(config), hidden, [1, 2, 3], counts, everything) == without


def output_of(drafter: Drafter, noise: Tensor, features: Tensor, block_size: int) -> Tensor:
    """Hidden rows of two blocks of one entry each, after the same context."""
    config, length = drafter.config, len(features)
    cache = KVCache.of(config, 2, 64)
    spans = [Span(0, 0, length), Span(1, 0, length)]
    context = drafter.project_context(torch.cat([features, features]))
    cache.write_all(spans, *drafter.context_kv(context, span_positions(spans)))
    blocks = [Span(entry, length, config.rows(block_size)) for entry in (0, 1)]
    attend = RaggedAttention(cache, blocks, config.layers, config.num_attention_heads)
    out: Tensor = drafter(noise, span_positions(blocks), attend, block_size=block_size)
    return out


@torch.inference_mode()
def test_a_convolution_stays_in_its_block(tmp_path: Path) -> None:
    config = tiny_drafter_config(block_size=6, convolution=CONVOLUTION)
    drafter = drafter_of(tmp_path / "drafter", config, random_tensors(config))
    features, noise = torch.randn(9, config.feature_size), torch.randn(12, config.hidden_size)
    both = output_of(drafter, noise, features, 6)
    other = output_of(drafter, torch.cat([torch.randn(6, config.hidden_size), noise[6:]]), features, 6)
    assert torch.equal(both[6:], other[6:])
    assert not torch.equal(both[:6], other[:6])
    narrow = output_of(drafter, torch.cat([noise[:4], noise[6:10]]), features, 4)
    assert narrow.shape == (8, config.hidden_size)


@pytest.mark.parametrize(
    "heads",
    [{"markov": VANILLA}, {"convolution": CONVOLUTION}, {"convolution": CONVOLUTION, "selector": SELECTOR}],
    ids=["zero Markov head", "identity convolution", "identity convolution, zero codebooks"],
)
@torch.inference_mode()
def test_an_idle_head_is_plain_dflash_to_the_last_bit(heads: dict[str, object], tmp_path: Path) -> None:
    plain_config, config = tiny_drafter_config(block_size=6), tiny_drafter_config(block_size=6, **heads)
    tensors = make_idle(config, random_tensors(config, seed=9))
    shared = {name: tensors[name] for name in random_tensors(plain_config)}
    plain = drafter_of(tmp_path / "plain", plain_config, shared)
    headed = drafter_of(tmp_path / "headed", config, tensors)
    features, noise = torch.randn(9, config.feature_size), torch.randn(12, config.hidden_size)
    hidden = output_of(plain, noise, features, 6)
    assert torch.equal(hidden, output_of(headed, noise, features, 6))
    head, rows = head_of(config), hidden[[1, 2, 3, 4, 5, 7, 8, 9, 10, 11]]
    wanted = propose(plain, head, rows, [1, 2], [5, 5], [None, None])
    assert propose(headed, head, rows, [1, 2], [5, 5], [None, None]) == wanted


@torch.inference_mode()
def test_an_identity_map_is_plain_dflash_to_the_last_bit(tmp_path: Path) -> None:
    """All but one of the target's tokens, each its own: the logits of the others are the target's, bit by bit."""
    config = tiny_drafter_config(block_size=6, draft_vocabulary=95)
    tensors, head = random_tensors(config), torch.randn(96, 32)
    tensors |= {"d2t": torch.zeros(95, dtype=torch.int64), "lm_head.weight": head[:95].clone()}
    drafter, hidden = drafter_of(tmp_path / "drafter", config, tensors), hidden_of(config)[:, :5].flatten(0, 1)
    logits = hidden @ head.T
    logits[:, 95] = -torch.inf
    got = propose(drafter, lambda rows: rows @ head.T, hidden, [1, 2, 3], [5] * 3, [None] * 3)
    assert [token for draft in got for token in draft] == logits.argmax(-1).tolist()


@torch.inference_mode()
def test_anchor_first_rows_are_one_fewer_and_start_at_the_anchor(tmp_path: Path) -> None:
    config = tiny_drafter_config(block_size=6, **SHIFTED)
    drafter = drafter_of(tmp_path / "drafter", config, random_tensors(config))
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    noise = drafter.noise(torch.tensor([5, 9]), embedding).view(2, 5, -1)
    assert torch.equal(noise[:, 0], embedding[[5, 9]])
    assert torch.equal(noise[:, 1:], embedding[7].expand(2, 4, -1))
    assert (config.first_row, config.rows(), config.rows(4)) == (0, 5, 3)


@torch.inference_mode()
def test_confidence_is_a_logistic_of_hidden_and_markov_embedding(tmp_path: Path) -> None:
    config = tiny_drafter_config(**HEADS["Markov and confidence"])
    tensors = random_tensors(config)
    drafter = drafter_of(tmp_path / "drafter", config, tensors)
    assert drafter.confidence_head is not None
    hidden, previous = torch.randn(4, 32), tensors["markov_head.markov_w1.weight"][[1, 2, 3, 4]]
    weight, bias = tensors["confidence_head.proj.weight"][0], tensors["confidence_head.proj.bias"]
    expected = torch.cat([hidden, previous], dim=1) @ weight + bias
    torch.testing.assert_close(drafter.confidence_head(hidden, previous), expected)

"""Faults, on tiny pairs: each changes what it names and no answer, and is found tensor by tensor."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from dflash_serve.models.loader import load_drafter
from dflash_serve.speculation.params import SamplingParams
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.faults.kinds import DrafterFault, drafter_faults
from dflash_torch.faults.replay import EmbeddedReference
from dflash_torch.faults.tensors import first_difference
from dflash_torch.model_runner import Runner
from tests.support.embedded import answers, tiny_engine
from tests.support.heads import HEADS
from tests.support.tiny_target import write_tiny_pair
from tests.unit.dflash_torch.test_heads import BLOCK, pair_with

PROMPT = "the quick brown fox jumps over the lazy dog"
FIRST = {
    "layer ids": "features of target layer",
    "layer order": "features of target layer",
    "mask token": "block input",
    "block attention": "output of drafter layer 0",
    "window": "output of drafter layer",
    "RoPE theta": "context keys of drafter layer 0",
    "RoPE scaling": "context keys of drafter layer 0",
    "embedding scale": "block input",
    "anchor": "block input",
    "positions": "block positions",
    "slot convention": "block input",
    "draft head": "drafts",
    "vocabulary map": "drafts",
    "convolution": "output of drafter layer 0",
    "selector": "drafts",
    "Markov head": "drafts",
    "features": "context keys of drafter layer 0",
    "feature rows": "context keys of drafter layer 0",
    "prompt context": "context keys of drafter layer 0",
    "stale context": "context keys of drafter layer 0",
    "layer 0": "output of drafter layer 0",
    "layer 1": "output of drafter layer 1",
    "fc": "context keys of drafter layer 0",
    "hidden_norm": "context keys of drafter layer 0",
    "norm": "block output",
    "dtype": "context keys of drafter layer 0",
    "quantised drafter": "context keys of drafter layer 0",
}
"""Where each cause shows first."""
INVISIBLE = {"head in FP8", "accepted tokens not injected"}
"""Here: a rounded head drafts the same tokens, and of a random drafter's tokens none is ever accepted."""


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> EmbeddedEngine:
    return tiny_engine(pair, width=4, max_batch_size=3)


@pytest.fixture(scope="module")
def faults(engine: EmbeddedEngine) -> dict[str, DrafterFault]:
    assert engine.scheduler.speculator is not None
    return {fault.name: fault for fault in drafter_faults(engine.scheduler.speculator)}


def with_fault(engine: EmbeddedEngine, fault: DrafterFault) -> EmbeddedEngine:
    assert engine.scheduler.speculator is not None
    suspect = copy.copy(engine)
    suspect.scheduler = copy.copy(engine.scheduler)
    suspect.scheduler.speculator = fault.change(engine.scheduler.speculator)
    return suspect


@pytest.mark.parametrize("static", [False, True], ids=["ragged", "padded"])
def test_a_sound_engine_differs_nowhere(
    engine: EmbeddedEngine, pair: tuple[Path, Path], static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Runner.__init__
    monkeypatch.setattr(Runner, "__init__", lambda self, cache, **_: begin(self, cache, static=static))
    assert first_difference(engine, *pair, PROMPT) is None


def test_every_fault_is_found_where_it_shows_first(
    engine: EmbeddedEngine, faults: dict[str, DrafterFault], pair: tuple[Path, Path]
) -> None:
    found = {}
    for fault in faults.values():
        difference = first_difference(with_fault(engine, fault), *pair, PROMPT)
        found[fault.name] = difference.tensor if difference else None
    wrong = {
        name: where
        for name, where in found.items()
        if name not in INVISIBLE and not (where or "").startswith(FIRST[faults[name].cause])
    }
    assert wrong == {}


def test_the_sound_speculator_is_left_as_it_was(engine: EmbeddedEngine, faults: dict[str, DrafterFault]) -> None:
    speculator = engine.scheduler.speculator
    assert speculator is not None
    config, state = speculator.drafter.config, {n: t.clone() for n, t in speculator.drafter.state_dict().items()}
    for fault in faults.values():
        assert fault.change(speculator) is not speculator
    assert speculator.drafter.config is config
    assert all(torch.equal(tensor, state[name]) for name, tensor in speculator.drafter.state_dict().items())


def test_a_replay_counts_what_the_real_loop_counts(engine: EmbeddedEngine, pair: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [PROMPT, "over", '{"name": [1']
    reference = EmbeddedReference(engine, load_drafter(pair[1]), prompts, params, 4)
    sound = answers(engine.fixed(4), prompts, params)
    assert reference.predict(None) == reference.loop()
    assert reference.predict(None).counts == tuple(output.statistics for output in sound)
    for fault in drafter_faults(reference.speculator):
        found = answers(engine.fixed(4, fault=fault.name), prompts, params)
        assert reference.predict(fault.name).counts == tuple(output.statistics for output in found), fault.name
        assert [output.token_ids for output in found] == [output.token_ids for output in sound]


OF_HEADS = {
    "reduced vocabulary": {"lm_head replaced by the target's": "drafts", "d2t as absolute ids": "drafts"},
    "vanilla Markov": {"Markov head not loaded": "drafts", "slots read as fill-in": "block input"},
    "DFlash2": {"convolution dropped": "output of drafter layer 0", "codebooks left zero": "drafts"},
    "plain": {"slots read as anchor-first": "block input"},
}


@pytest.mark.parametrize("kind", OF_HEADS)
def test_a_heads_fault_is_found_where_it_shows_and_changes_no_answer(kind: str, tmp_path: Path) -> None:
    pair = pair_with(write_tiny_pair(tmp_path / "pair"), tmp_path / "drafter", HEADS[kind])
    engine = tiny_engine(pair, width=BLOCK, max_batch_size=3)
    assert first_difference(engine, *pair, PROMPT) is None
    speculator = engine.scheduler.speculator
    assert speculator is not None
    faults = {fault.name: fault for fault in drafter_faults(speculator)}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = answers(engine, [PROMPT], params)[0].token_ids
    for name, where in OF_HEADS[kind].items():
        difference = first_difference(with_fault(engine, faults[name]), *pair, PROMPT)
        assert difference is not None
        assert difference.tensor.startswith(where)
        assert answers(engine.fixed(BLOCK, fault=name), [PROMPT], params)[0].token_ids == expected

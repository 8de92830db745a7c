"""Faults of heads: each is found tensor by tensor, and changes drafts and no answer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from dflash_serve.doctor.diagnosis import HEALTHY, Hypothesis, Verdict, diagnose
from dflash_serve.doctor.evidence import Observation
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_torch.faults.catalogue import catalogue
from dflash_torch.faults.tensors import first_difference
from tests.support.embedded import answers, tiny_engine
from tests.support.heads import HEADS
from tests.support.tiny_target import write_tiny_pair
from tests.unit.dflash_torch.test_heads import BLOCK, pair_with

PROMPT = "the quick brown fox jumps over the lazy dog"
FAULTS = {
    "reduced vocabulary": {"lm_head replaced by the target's": "drafts", "d2t as absolute ids": "drafts"},
    "vanilla Markov": {"Markov head not loaded": "drafts", "slots read as fill-in": "block input"},
    "DFlash2": {"convolution dropped": "output of drafter layer 0", "codebooks left zero": "drafts"},
    "plain": {"slots read as anchor-first": "block input"},
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_heads_fault_is_found_where_it_shows_and_changes_no_answer(kind: str, tmp_path: Path) -> None:
    folders = pair_with(write_tiny_pair(tmp_path / "pair"), tmp_path / "drafter", HEADS[kind])
    engine = tiny_engine(folders, width=BLOCK, max_batch_size=3)
    assert first_difference(engine, *folders, PROMPT) is None
    speculator = engine.scheduler.speculator
    assert speculator is not None
    faults = {fault.name: fault for fault in catalogue(speculator)}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = answers(engine, [PROMPT], params)[0].token_ids
    for name, where in FAULTS[kind].items():
        suspect = copy.copy(engine)
        suspect.scheduler = copy.copy(engine.scheduler)
        suspect.scheduler.speculator = faults[name].change(speculator)
        difference = first_difference(suspect, *folders, PROMPT)
        assert difference is not None
        assert difference.tensor.startswith(where)
        assert answers(engine.fixed(BLOCK, fault=name), [PROMPT], params)[0].token_ids == expected


def counts(accepted: int, steps: int = 40, width: int = 4) -> AcceptanceStatistics:
    made = AcceptanceStatistics()
    made.record(width, accepted, steps)
    return made


def test_acceptance_of_exactly_one_is_no_good_drafter() -> None:
    healthy = Hypothesis(HEALTHY, "healthy", "", (counts(2),))
    other = Hypothesis("norm", "final norm missing", "", (counts(0),))
    found = diagnose(Observation(counts(3), (counts(3),)), [healthy, other])
    assert found.verdict is Verdict.FAULT
    assert found.named == ("verification",)
    assert "all of 120 drafted tokens were accepted, an acceptance of exactly 1.000" in found.sentence
    few = diagnose(Observation(counts(3, steps=4), (counts(3, steps=4),)), [healthy, other])
    assert few.named != ("verification",)
    right = Hypothesis(HEALTHY, "healthy", "", (counts(3),))
    assert diagnose(Observation(counts(3), (counts(3),)), [right, other]).verdict is Verdict.HEALTHY

"""The doctor at the real server: faults that no file gives away, and of which vLLM says nothing, are called by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import BUNDLED_DRAFTER
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.store import Store
from dflash_serve.doctor.diagnosis import Hypothesis, Verdict, diagnose
from dflash_serve.doctor.evidence import interview
from dflash_serve.doctor.examination import Examination
from dflash_serve.models.loader import load_drafter
from dflash_torch.faults.replay import EmbeddedReference
from tests.support.fleet import Fleet, fleet
from tests.support.prompts import word_problems
from tests.support.tiny import edit_json
from tests.support.vllm_server import OnCpu, Server, serving, smollm2

# Eight minutes on two cores: every fault that the doctor knows is replayed, and five servers are asked.
wanted = os.environ.get("DFLASH_SERVE_TEST_DOCTOR") == "1"
pytestmark = [pytest.mark.model, pytest.mark.skipif(not wanted, reason="`make test-vllm-doctor` runs it")]
BLOCK, COUNT = 8, 20  # with 12 prompts RoPE theta, the weakest fault, was named with a probability of 0.90 alone
PARAMS = SamplingParams(temperature=0, max_tokens=48)
PROMPTS = word_problems(COUNT)
SUSPECTS: Mapping[str, tuple[Mapping[str, object], str]] = {
    "healthy": ({}, "healthy"),
    "mask token": ({"dflash_config.mask_token_id": 0}, "mask token 0"),
    "layer ids": ({"dflash_config.target_layer_ids": [2, 9, 15, 21, 28]}, "layer ids +1"),
    "block attention": ({"is_causal": True}, "causal block attention"),
    "RoPE theta": ({"rope_theta": 1e6}, "RoPE theta 1e+06"),
}
"""Cause -> what its config.json says instead, and the doctor's name for it."""


@pytest.fixture(scope="module")
def hypotheses() -> list[Hypothesis]:
    """What the sound drafter and every known fault of it predict."""
    engine: Any = LLM("smollm2", "smollm2", width=BLOCK, max_batch_size=COUNT, max_model_len=512).engine
    drafter = load_drafter(BUNDLED_DRAFTER, dtype=torch.float32)
    reference = EmbeddedReference(engine, drafter, PROMPTS, PARAMS, BLOCK)
    return Examination(reference, Store(None, {})).hypotheses()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    """One for each suspect: our checks find nothing wrong with any of them."""
    folder = tmp_path_factory.mktemp("suspects")
    fleets = {}
    for cause, (change, _) in SUSPECTS.items():
        drafter = shutil.copytree(BUNDLED_DRAFTER, folder / cause / "drafter")
        edit_json(drafter / "config.json", change)
        (drafter / "provenance.json").unlink(missing_ok=True)
        fleets[cause] = (smollm2(BLOCK, drafter={"model": str(drafter)}), OnCpu())
    with fleet(serving, folder, fleets) as running:
        yield running


@pytest.mark.parametrize("cause", SUSPECTS)
def test_a_server_with_a_fault_is_diagnosed_from_outside(
    cause: str, servers: Fleet[Server], hypotheses: list[Hypothesis]
) -> None:
    server = servers[cause].ready.result()
    told = interview(Endpoint(server.url), PROMPTS, PARAMS, BLOCK)
    servers[cause].left.set()
    found = diagnose(told.observation, hypotheses)
    assert told.width == BLOCK
    assert (found.verdict, found.named[0]) == (Verdict.HEALTHY if cause == "healthy" else Verdict.FAULT, cause)
    assert found.explanations[0].name == SUSPECTS[cause][1]

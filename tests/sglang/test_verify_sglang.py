"""`verify` on the real SGLang server, started with and without DFlash: greedy decoding is lossless, and it says so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.backend import Command
from dflash_serve.deployment import Deployment
from dflash_serve.proving.acceptance_reading import AcceptanceReading
from dflash_serve.proving.answer import Answer
from dflash_serve.proving.journal import Journal
from dflash_serve.proving.lossless.findings import Fault, Findings
from dflash_serve.proving.lossless.launched import Launcher
from dflash_serve.proving.lossless.plan import SAMPLED, Plan, Question
from dflash_serve.proving.lossless.sides import Pair
from dflash_serve.proving.lossless.verification import Verification
from dflash_sglang import SGLangBackend
from tests.support.sglang_server import ENVIRONMENT, ON_CPU
from tests.support.tiny import tiny_drafter_config, write_tiny_drafter
from tests.support.tiny_target import SPECIALS, write_tiny_target

PROMPTS = ["the quick brown fox", '{"name": [1', "over the lazy dog jumps", "fox fox fox", "true false", "dog"]
BLOCK = 4
pytestmark = pytest.mark.timeout(1500)  # three starts of a server


class OnCpu(SGLangBackend):
    """Its command with the flags of the CPU test platform, where float32 makes losslessness exact."""

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        command = super().command(deployment, folder, host=host, port=port)
        return replace(command, argv=(*command.argv, *ON_CPU), env={**ENVIRONMENT, **command.env})


class Nobody:
    """A side that must not be asked again."""

    def answers(
        self, questions: Sequence[Question], *, top_logprobs: int | None = None
    ) -> Iterator[tuple[int, Answer]]:
        raise AssertionError(f"asked again: {len(questions)} questions")

    def acceptance(self) -> AcceptanceReading:
        return AcceptanceReading()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_target(folder / "target", family="qwen3", positions=512)
    config = tiny_drafter_config(
        block_size=BLOCK,
        num_target_layers=4,
        target_layer_ids=(0, 1, 2),
        mask_token_id=SPECIALS.index("<mask>"),
        vocab_size=json.loads((target / "config.json").read_text())["vocab_size"],
        max_position_embeddings=512,
    )
    drafter = write_tiny_drafter(folder / "drafter", config)
    fields: Mapping[str, Any] = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    return Deployment.model_validate({**fields, "limits": {"max_batch_size": 8}, "speculation": {"width": BLOCK}})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(prompts=len(PROMPTS), prompts_sha256="", max_tokens=48, samples=4, dtype="float32")


@pytest.fixture(scope="module")
def everything(
    deployment: Deployment, plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Journal, Findings]:
    """One verification of all cases."""
    journal = Journal(None, {})
    pair = Launcher(OnCpu(), tmp_path_factory.mktemp("servers"), patience=480, concurrency=8).pair(deployment)
    return journal, Verification(plan, PROMPTS, pair, journal).run()


@pytest.fixture
def journal(everything: tuple[Journal, Findings]) -> Journal:
    return everything[0]


def again(plan: Plan, journal: Journal, **changes: Any) -> Findings:
    """What the same answers say under other settings."""
    nobody = Pair(lambda: nullcontext(Nobody()), lambda: nullcontext(Nobody()))
    return Verification(plan.model_copy(update=changes), PROMPTS, nobody, journal).run()


def test_greedy_decoding_is_lossless(plan: Plan, journal: Journal) -> None:
    found = again(plan, journal, samples=0, penalties=False)
    assert (found.verdict, found.faults, found.unit) == ("lossless", (), "token ids")
    assert found.accepted
    assert found.greedy[0].identical == len(PROMPTS)


def test_penalties_are_frozen_inside_its_blocks_and_that_is_said(plan: Plan, journal: Journal) -> None:
    """SGLang 0.5.23 adds one penalty to all rows of a block (`apply_dflash_verify_logits_adjustments`)."""
    found = again(plan, journal, samples=0)
    assert (found.verdict, found.faults) == ("not lossless", (Fault.PENALTIES,))


def test_sampling_that_is_refused_is_not_called_lossless(everything: tuple[Journal, Findings]) -> None:
    found = everything[1]
    assert all("would answer greedily without saying so" in str(one.refused) for one in found.sampled)
    assert sum("`--samples 0` verifies greedy decoding alone" in reason for reason in found.reasons) == len(SAMPLED)

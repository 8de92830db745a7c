"""`verify` on the real SGLang server, started with and without DFlash: greedy decoding is lossless, and it says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dflash_serve.client.answer import Answer
from dflash_serve.proving.lossless.findings import Findings
from dflash_serve.proving.lossless.launched import Launcher
from dflash_serve.proving.lossless.plan import SAMPLED, Plan, Question
from dflash_serve.proving.lossless.sides import Pair
from dflash_serve.proving.lossless.verification import Verification

from dflash_serve.backend import Command
from dflash_serve.common.journal import Journal
from dflash_serve.deployment import Deployment
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_sglang import SGLangBackend
from tests.sglang.test_smollm2_server import deployment
from tests.support.prompts import word_problems
from tests.support.sglang_server import ENVIRONMENT, ON_CPU

WIDTH, COUNT = 8, 8
PROMPTS = word_problems(COUNT)
PLAN = Plan(prompts=COUNT, prompts_sha256="", max_tokens=48, samples=4, dtype="float32")
pytestmark = [pytest.mark.model, pytest.mark.timeout(1500)]  # two starts of a server


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

    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics.unknown()


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Journal, Findings]:
    """One verification of all cases."""
    journal = Journal(None, {})
    pair = Launcher(OnCpu(), tmp_path_factory.mktemp("servers"), patience=480, concurrency=8).pair(deployment(WIDTH))
    return journal, Verification(PLAN, PROMPTS, pair, journal).run()


def again(journal: Journal, **changes: Any) -> Findings:
    """What the same answers say under other settings."""
    nobody = Pair(lambda: nullcontext(Nobody()), lambda: nullcontext(Nobody()))
    return Verification(PLAN.model_copy(update=changes), PROMPTS, nobody, journal).run()


def test_greedy_decoding_is_lossless(everything: tuple[Journal, Findings]) -> None:
    found = again(everything[0], samples=0, penalties=False)
    assert (found.verdict, found.faults, found.unit) == ("lossless", (), "tokens")
    assert found.greedy[0].identical == COUNT
    assert found.acceptance_length is not None
    assert found.acceptance_length > 1.1


def test_what_is_refused_is_not_called_lossless(everything: tuple[Journal, Findings]) -> None:
    found = everything[1]
    assert found.verdict == "could not tell"
    assert "does not count the tokens of DFlash steps" in str(found.greedy[1].refused)
    assert any("`--no-penalties` verifies the rest" in reason for reason in found.reasons)
    assert all("would answer greedily without saying so" in str(one.refused) for one in found.sampled[:-1])
    assert sum("`--samples 0` verifies greedy decoding alone" in reason for reason in found.reasons) == len(SAMPLED)

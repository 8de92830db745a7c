"""One sentence of a plan for long requests: K/V of the drafter, its windows, and what its acceptance is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GPUS
from dflash_serve.planning.acceptance import from_length
from dflash_serve.planning.long_contexts import long_context
from dflash_serve.planning.prediction import Load, constants_of
from dflash_serve.planning.question import Objective, PlanQuestion
from tests.support.planned import planned_pair


def question(folder: Path, backend: str = "sglang", isl: int = 64_000, **speculation: object) -> PlanQuestion:
    given = {"target": {"model": "Qwen/Qwen3-8B"}, "drafter": {"model": "x/y"}, "speculation": speculation}
    return PlanQuestion(
        deployment=Deployment.model_validate(given),
        backend=backend,
        on=GPUS["h200"],
        pair=planned_pair(folder),
        block_size=16,
        load=Load(isl, 1536),
        objective=Objective(),
        acceptances=(from_length(6.5, 16, "published"),),
        constants=constants_of(backend, None),
    )


def test_short_requests_are_told_nothing(tmp_path: Path) -> None:
    assert long_context(question(tmp_path, isl=1000)) is None


def test_the_drafter_s_k_v_is_told_at_the_plan_s_length_and_at_64k_and_128k(tmp_path: Path) -> None:
    told = long_context(question(tmp_path))
    assert told is not None
    # 5 layers x 8 heads x 128 x 2 x 2 bytes = 20 KiB a token; the target has 36 layers
    assert "A request of 65,536 tokens has 1.25 GiB of the drafter's K/V beside 9.00 of the target's" in told
    assert "(1.25 at 64k, 2.50 at 128k)" in told
    assert "fell from \N{GREEK SMALL LETTER TAU} 4.53 on short to 2.09 on 32K prompts" in told


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("sglang", "None of its layers has a window (speculation.draft_window bounds it)"),
        ("vllm", "None of its layers has a window (vLLM has no window for drafters that were trained without one)"),
    ],
)
def test_a_drafter_without_windows_is_told_what_the_engine_can_do(tmp_path: Path, backend: str, words: str) -> None:
    assert words in str(long_context(question(tmp_path, backend)))


def test_windows_and_acceptance_by_length_are_told_as_they_are(tmp_path: Path) -> None:
    asked = question(tmp_path)
    layers = (*(AttentionKind(window=2048),) * 4, AttentionKind())
    pair = replace(asked.pair, drafter=asked.pair.drafter.model_copy(update={"layers": layers}))
    measured = from_length(3, 16, "measured: contexts of 65536-131071 tokens of report.json")
    told = str(long_context(replace(asked, pair=pair, acceptances=(measured,))))
    assert told.endswith("4 of its 5 layers read windows of 2,048 tokens.")
    assert "The drafter reads 4096 tokens" in str(long_context(question(tmp_path, draft_window=4096)))

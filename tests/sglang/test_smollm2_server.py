"""The real server with SmolLM2-135M-Instruct and the drafter we ship: no token changed, widths that follow the load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_serve import LLM, SamplingParams
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_torch.target import target_folder
from tests.support.prompts import word_problems
from tests.support.sglang_server import Server, serving

pytestmark = pytest.mark.model
PROMPTS, TOKENS, STREAMS, CROWD = 20, 64, 10, 16
FLAT_THEN_STEEP = {"target": {1: 1.0, 8: 1.0, 256: 32.0}, "draft": {1: 0.05, 16: 0.05}}
"""A machine on which 8 rows cost no more than one, and every further row costs in full."""
Tokens = list[list[int]]


def deployment(width: int | str) -> Deployment:
    try:
        target = str(target_folder("smollm2"))
    except UserError as error:
        pytest.skip(str(error))
    fields: dict[str, Any] = {"target": {"model": target}, "drafter": {"model": "smollm2"}}
    limits = {"max_batch_size": CROWD, "max_model_len": 1024}
    return Deployment.model_validate({**fields, "limits": limits, "speculation": {"width": width}})


@pytest.fixture(scope="module")
def embedded() -> LLM:
    deployment("off")
    return LLM("smollm2", "smollm2", width=8, max_model_len=1024, max_batch_size=STREAMS)


@pytest.fixture(scope="module")
def prompts(embedded: LLM) -> Tokens:
    return [embedded.engine.tokenise(prompt) for prompt in word_problems(PROMPTS)]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(prompts: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    with serving(deployment("off"), tmp_path_factory.mktemp("plain")) as server:
        return server.tokens(prompts, TOKENS, STREAMS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(deployment(8), tmp_path_factory.mktemp("whole")) as server:
        yield server


@pytest.fixture(scope="module")
def automatic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("automatic")
    table = folder / "cost.json"
    table.write_text(json.dumps(FLAT_THEN_STEEP))
    with serving(deployment("auto"), folder, env={"DFLASH_SERVE_COST_TABLE": str(table)}) as server:
        yield server


def acceptance_length(server: Server) -> float:
    steps = server.metrics("dflash_serve:steps_total", "width")
    speculated = sum(count for width, count in steps.items() if width != "1")
    return 1 + server.metric("dflash_serve:slots_accepted_total") / speculated


def mean_width(before: dict[str, float], after: dict[str, float]) -> float:
    steps = {int(width): count - before.get(width, 0.0) for width, count in after.items()}
    return sum(width * count for width, count in steps.items()) / sum(steps.values())


def test_dflash_changes_no_token_and_accepts_what_the_embedded_engine_does(
    embedded: LLM, prompts: Tokens, plain: Tokens, whole: Server
) -> None:
    assert whole.tokens(prompts, TOKENS, STREAMS) == plain
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    list(embedded.engine.stream(prompts, [params] * len(prompts)))
    reference = embedded.engine.decoder.statistics.acceptance_length  # type: ignore[attr-defined]
    assert acceptance_length(whole) > 1.1
    assert acceptance_length(whole) == pytest.approx(reference, rel=0.05)


def test_a_policy_of_widths_changes_no_token(prompts: Tokens, plain: Tokens, automatic: Server) -> None:
    assert automatic.tokens(prompts[:4], TOKENS) == plain[:4]
    assert automatic.tokens(prompts, TOKENS, CROWD) == plain


def test_one_stream_is_served_wide_and_a_crowd_narrow(prompts: Tokens, automatic: Server) -> None:
    def steps() -> dict[str, float]:
        return automatic.metrics("dflash_serve:steps_total", "width")

    start = steps()
    automatic.tokens(prompts[:3], TOKENS)
    middle = steps()
    automatic.tokens(prompts[:CROWD], TOKENS, CROWD)
    alone, crowded = mean_width(start, middle), mean_width(middle, steps())
    assert alone > 6
    assert crowded < 3

"""The real server with SmolLM2-135M-Instruct and the drafter we ship: no token changed, widths that follow the load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_tokenizer
from tests.support.prompts import word_problems
from tests.support.sglang_server import Server, serving

pytestmark = pytest.mark.model
PROMPTS, TOKENS, STREAMS, CROWD = 20, 64, 10, 16
FLAT_THEN_STEEP = {"target": {1: 1.0, 8: 1.0, 256: 32.0}, "draft": {1: 0.05, 16: 0.05}}
"""A machine on which 8 rows cost no more than one, and every further row costs in full."""
SCHEMA = json.dumps({"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]})
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
def prompts() -> Tokens:
    deployment("off")  # skips where there is no SmolLM2
    tokenizer = load_tokenizer("smollm2")
    encoded = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        for messages in word_problems(PROMPTS)
    ]
    return [list(one["input_ids"]) for one in encoded]


@dataclass(frozen=True)
class Answers:
    """What a server made of the prompts, of one with log probabilities and of one with a grammar."""

    tokens: Tokens
    logprobs: list[float]
    schema: str


def special_answers(server: Server, prompts: Tokens) -> tuple[list[float], str]:
    logged = server.generate(prompts[0], 16, return_logprob=True)["meta_info"]["output_token_logprobs"]
    schema = server.generate(prompts[1], 32, json_schema=SCHEMA, ignore_eos=False)["text"]
    return [entry[0] for entry in logged], schema


def assert_same_special_answers(server: Server, prompts: Tokens, plain: Answers) -> None:
    logprobs, schema = special_answers(server, prompts)
    assert logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    assert schema == plain.schema


@pytest.fixture(scope="module")
def plain(prompts: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    with serving(deployment("off"), tmp_path_factory.mktemp("plain")) as server:
        return Answers(server.tokens(prompts, TOKENS, STREAMS), *special_answers(server, prompts))


def acceptance_length(server: Server) -> float:
    steps = server.metrics("dflash_serve:steps_total", "width")
    speculated = sum(count for width, count in steps.items() if width != "1")
    return 1 + server.metric("dflash_serve:slots_accepted_total") / speculated


def mean_width(before: dict[str, float], after: dict[str, float]) -> float:
    steps = {int(width): count - before.get(width, 0.0) for width, count in after.items()}
    return sum(width * count for width, count in steps.items()) / sum(steps.values())


def test_dflash_changes_no_token_and_accepts_what_the_embedded_engine_does(
    prompts: Tokens, plain: Answers, tmp_path: Path
) -> None:
    with serving(deployment(8), tmp_path) as server:
        assert server.tokens(prompts, TOKENS, STREAMS) == plain.tokens
        found = acceptance_length(server)
        assert_same_special_answers(server, prompts, plain)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    engine = LLM("smollm2", str(tmp_path / "draft"), width=8, max_model_len=1024, max_batch_size=STREAMS).engine
    list(engine.stream(prompts, [params] * len(prompts)))
    reference = engine.scheduler.statistics.acceptance_length  # type: ignore[attr-defined]
    assert found > 1.1
    assert found == pytest.approx(reference, rel=0.05)


def test_one_stream_is_served_wide_and_a_crowd_narrow_and_no_token_changes(
    prompts: Tokens, plain: Answers, tmp_path: Path
) -> None:
    table = tmp_path / "cost.json"
    table.write_text(json.dumps(FLAT_THEN_STEEP))
    with serving(deployment("auto"), tmp_path, env={"DFLASH_SERVE_COST_TABLE": str(table)}) as server:
        assert server.tokens(prompts[:3], TOKENS) == plain.tokens[:3]
        assert_same_special_answers(server, prompts, plain)
        alone = server.metrics("dflash_serve:steps_total", "width")
        assert server.tokens(prompts, TOKENS, CROWD) == plain.tokens
        both = server.metrics("dflash_serve:steps_total", "width")
    assert mean_width({}, alone) > 6
    assert mean_width(alone, both) < 3

"""The real server with SmolLM2-135M-Instruct and the drafter we ship: no token changed, widths that follow the load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from dflash_serve import LLM, SamplingParams
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from tests.support.prompts import word_problems
from tests.support.sglang_server import CROWD, Server

pytestmark = pytest.mark.model
PROMPTS, TOKENS, STREAMS = 20, 64, 10
SCHEMA = json.dumps({"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]})
Tokens = list[list[int]]
Servers = Mapping[str, Future[Server]]


@pytest.fixture(scope="module")
def prompts(smollm2_servers: Servers) -> Tokens:
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
def plain(prompts: Tokens, smollm2_servers: Servers) -> Answers:
    server = smollm2_servers["plain"].result()
    return Answers(server.tokens(prompts, TOKENS, STREAMS), *special_answers(server, prompts))


def mean_width(statistics: AcceptanceStatistics) -> float:
    assert statistics.widths is not None
    steps = sum(statistics.widths.values())
    return sum(width * count for width, count in statistics.widths.items()) / steps


def test_dflash_changes_no_token_and_accepts_what_the_embedded_engine_does(
    prompts: Tokens, plain: Answers, smollm2_servers: Servers
) -> None:
    server = smollm2_servers["DFLASH"].result()
    before = read_acceptance(server.url)
    assert server.tokens(prompts, TOKENS, STREAMS) == plain.tokens
    found = read_acceptance(server.url).since(before).acceptance_length
    assert_same_special_answers(server, prompts, plain)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    llm = LLM("smollm2", str(server.folder / "draft"), width=8, max_model_len=1024, max_batch_size=STREAMS)
    reference = total(output.statistics for output in llm.generate(prompts, params)).acceptance_length
    assert found is not None
    assert found > 1.1
    assert found == pytest.approx(reference, rel=0.05)


def test_one_stream_is_served_wide_and_a_crowd_narrow_and_no_token_changes(
    prompts: Tokens, plain: Answers, smollm2_servers: Servers
) -> None:
    server = smollm2_servers["automatic"].result()
    started = read_acceptance(server.url)
    assert server.tokens(prompts[:3], TOKENS) == plain.tokens[:3]
    assert_same_special_answers(server, prompts, plain)
    alone = read_acceptance(server.url)
    assert server.tokens(prompts, TOKENS, CROWD) == plain.tokens
    crowd = read_acceptance(server.url)
    assert mean_width(alone.since(started)) > 6
    assert mean_width(crowd.since(alone)) < 3

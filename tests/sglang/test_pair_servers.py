"""Real halves of a disaggregated pair: no token changes, acceptance is that of one server, and the decode half refuses
a prefill half without the drafter.

Three servers start, two at a time, of 3 GB each: `make test-distributed`.
"""

from __future__ import annotations

import os
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_serve import LLM, SamplingParams
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.common.processes import free_port
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.speculation.statistics import total
from tests.support.fleet import Fleet, fleet
from tests.support.prompts import word_problems
from tests.support.sglang_pair import Pair, half
from tests.support.sglang_server import Server, serving, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("DFLASH_SERVE_TEST_DISTRIBUTED" not in os.environ, reason="make test-distributed"),
]
PROMPTS, TOKENS = 4, 32
PORTS = {"prefill": free_port(), "bare": free_port()}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    """Two halves with the drafter; `bare`, a prefill half without it, takes the place of the first one."""
    wanted = {
        "prefill": half(smollm2(8), "prefill", PORTS["prefill"]),
        "decode": half(smollm2(8), "decode", PORTS["prefill"]),
        "bare": half(smollm2("off").model_copy(update={"drafter": None}), "prefill", PORTS["bare"]),
    }
    with fleet(serving, tmp_path_factory.mktemp("pair"), wanted) as running:
        yield running


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer("smollm2")
    encoded = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        for messages in word_problems(PROMPTS)
    )
    return [list(one["input_ids"]) for one in encoded]


def test_a_pair_answers_and_accepts_as_one_server_does(servers: Fleet[Server], prompts: list[list[int]]) -> None:
    prefill, decode = (servers[name].ready.result() for name in ("prefill", "decode"))
    pair = Pair(prefill, decode, PORTS["prefill"])
    before = read_acceptance(decode.url)
    answers = [pair.generate(prompt, TOKENS)["output_ids"] for prompt in prompts]
    found = read_acceptance(decode.url).since(before)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    llm = LLM("smollm2", str(decode.folder / "draft"), width=8, max_model_len=1024, max_batch_size=1)
    whole = llm.generate(prompts, params)
    assert answers == [output.token_ids for output in whole]
    reference = total(output.statistics for output in whole)
    assert found.acceptance_length == pytest.approx(reference.acceptance_length, rel=0.02)


def test_a_prefill_half_without_the_drafter_is_refused_by_the_decode_half(
    servers: Fleet[Server], prompts: list[list[int]]
) -> None:
    servers["prefill"].left.set()
    bare, decode = (servers[name].ready.result() for name in ("bare", "decode"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        Pair(bare, decode, PORTS["bare"]).generate(prompts[0], TOKENS)
    said = f"the prefill half at 127.0.0.1:{PORTS['bare']} runs no drafter, this decode half DFLASH"
    assert said in refused.value.read().decode()
    assert said in Path(decode.folder, "server.log").read_text()

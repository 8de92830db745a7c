"""The real server with SmolLM2-135M-Instruct and the drafters we ship: no token changed, which `verify` says too, and
widths that follow the load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from dflash_serve import LLM, SamplingParams
from dflash_serve.adapter.counters import STEPS
from dflash_serve.checkpoint.source import WITH_HEAD
from dflash_serve.client.endpoint import Endpoint, Reply
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.common.http import RefusedError
from dflash_serve.common.store import Store
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_serve.training.answers import AnswerRequest, AnswerServer, ask
from dflash_serve.verify.questions import BASE, FEWEST, Question, VerifyPlan
from dflash_serve.verify.report import Findings
from dflash_serve.verify.subjects import ONE_SERVER, SubjectPair, one_server, two_servers
from dflash_serve.verify.verification import Verification
from tests.support.fleet import Fleet, fleet
from tests.support.prompts import brief, word_problems
from tests.support.sglang_server import CROWD, PATIENCE, OnCpu, Server, serving, smollm2

pytestmark = pytest.mark.model
PROMPTS, TOKENS, STREAMS = 20, 64, 10
SCHEMA = json.dumps({"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]})
Tokens = list[list[int]]
FLAT_THEN_STEEP = {"target": {1: 1.0, 8: 1.0, 256: 32.0}, "draft": {1: 0.05, 16: 0.05}}
"""Costs of a machine on which 8 rows cost no more than one, and every further row costs in full."""
VERIFIED = 4
"""Prompts of the verification."""
AT_ONCE = 64
"""Requests that are verified at once: larger batches take less time for each."""
VERIFYING = ("--max-running-requests", str(AT_ONCE))
PLAN = VerifyPlan(
    prompts=VERIFIED, prompts_sha256="", max_tokens=48, samples=4, pairs=4, long_tokens=0, dtype="float32"
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    """Without speculation (`plain`), in whole blocks (`DFLASH`; `DSPARK` with the trained Markov head), as wide as it
    pays (`automatic`), `narrow`, and in whole blocks for few requests only (`pausing`).

    `DFLASH` lacks the kernel that verifies sampled drafts, as some builds of SGLang do.

    With overlapped scheduling SGLang's plain decoding penalises a token by those before the last one only.
    """
    folder = tmp_path_factory.mktemp("smollm2")
    table = folder / "cost.json"
    table.write_text(json.dumps(FLAT_THEN_STEEP))
    wanted = {
        "plain": (smollm2("off"), OnCpu("--disable-overlap-schedule", *VERIFYING)),
        "DFLASH": (smollm2(8), OnCpu(env={"SGLANG_CPU_SAMPLING": "absent"})),
        "DSPARK": (smollm2(8, WITH_HEAD), OnCpu()),
        "automatic": (smollm2("auto"), OnCpu(env={"DFLASH_SERVE_COST_TABLE": str(table)})),
        "narrow": (smollm2(3), OnCpu(*VERIFYING)),
        "pausing": (smollm2("auto"), OnCpu(env={"DFLASH_SERVE_COST_TABLE": str(table), "SGLANG_CPU_DRAFTS_FOR": "4"})),
    }
    with fleet(serving, folder, wanted) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(servers: Fleet[Server]) -> Tokens:
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
def plain(prompts: Tokens, servers: Fleet[Server]) -> Answers:
    server = servers["plain"].ready.result()
    return Answers(server.tokens(prompts, TOKENS, STREAMS), *special_answers(server, prompts))


def mean_width(statistics: AcceptanceStatistics) -> float:
    assert statistics.widths is not None
    steps = sum(statistics.widths.values())
    return sum(width * count for width, count in statistics.widths.items()) / steps


@pytest.mark.parametrize("method", ["DFLASH", "DSPARK"])
def test_a_drafter_changes_no_token_and_accepts_what_the_embedded_engine_does(
    method: str, prompts: Tokens, plain: Answers, servers: Fleet[Server]
) -> None:
    server = servers[method].ready.result()
    before = read_acceptance(server.url)
    assert server.tokens(prompts, TOKENS, STREAMS) == plain.tokens
    found = read_acceptance(server.url).since(before).acceptance_length
    assert_same_special_answers(server, prompts, plain)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    llm = LLM("smollm2", str(server.folder / "draft"), width=8, max_model_len=1024, max_batch_size=STREAMS)
    reference = total(output.statistics for output in llm.generate(prompts, params)).acceptance_length
    assert found is not None
    assert found > 1.1
    print(f"{method}: acceptance length {found:.3f}, the embedded engine's {reference:.3f}")
    assert found == pytest.approx(reference, rel=0.03)


def test_answers_to_train_on_are_the_servers_and_end_with_their_stop_token(
    prompts: Tokens, plain: Answers, servers: Fleet[Server]
) -> None:
    server = servers["DFLASH"].ready.result()
    (answer,) = plain.tokens[:1]
    stop = next(token for at, token in enumerate(answer) if at > 7 and token not in answer[:at])
    params = SamplingParams(temperature=0, max_tokens=len(answer), stop_token_ids=(stop,))
    answering = AnswerServer(server.url, load_tokenizer("smollm2"), 1)
    (found,) = ask(answering, iter([AnswerRequest(0, tuple(prompts[0]), params)]), 1)
    assert (found.tokens, found.ended) == (answer[: answer.index(stop) + 1], True)


def test_one_stream_is_served_wide_and_a_crowd_narrow_and_no_token_changes(
    prompts: Tokens, plain: Answers, servers: Fleet[Server]
) -> None:
    server = servers["automatic"].ready.result()
    started = read_acceptance(server.url)
    assert server.tokens(prompts[:3], TOKENS) == plain.tokens[:3]
    assert_same_special_answers(server, prompts, plain)
    alone = read_acceptance(server.url)
    assert server.tokens(prompts, TOKENS, CROWD) == plain.tokens
    crowd = read_acceptance(server.url)
    assert mean_width(alone.since(started)) > mean_width(crowd.since(alone))


def test_requests_without_drafts_run_beside_others_with_drafts(
    prompts: Tokens, plain: Answers, servers: Fleet[Server]
) -> None:
    server, off = servers["automatic"].ready.result(), {"custom_params": {"speculative": "off"}}
    asked = list(zip(prompts[:4], ({}, off) * 2, strict=True))
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: server.generate(one[0], TOKENS, **one[1]), asked))
    assert [answer["output_ids"] for answer in found] == plain.tokens[:4]
    drafted = [answer["meta_info"]["spec_num_correct_drafts"] for answer in found]
    assert drafted[1::2] == [0, 0]
    assert min(drafted[::2]) > 0


def test_verify_compares_one_server_with_itself(servers: Fleet[Server]) -> None:
    pair = one_server(Endpoint(servers["automatic"].ready.result().url, timeout=PATIENCE, concurrency=8))
    plan = PLAN.model_copy(update={"max_tokens": 24, "samples": 0, "penalties": False})
    found = Verification(plan, brief(), pair, Store(None, {})).run()
    assert (found.verdict, found.faults) == ("lossless", {})
    assert ONE_SERVER in found.headline


def test_a_second_turn_is_drafted_as_well_as_its_prefix_computed_anew(prompts: Tokens, servers: Fleet[Server]) -> None:
    """The first answers were decoded without drafts, eight at once; their K/V are the prefixes of the second turns."""
    server = servers["pausing"].ready.result()
    turns = [prompt + answer for prompt, answer in zip(prompts[:8], server.tokens(prompts[:8], 48, 8), strict=True)]
    steps = server.samples.by(f"{STEPS}_total", "width")
    assert steps[1] > 0.8 * sum(steps.values())

    def acceptance() -> tuple[float, int]:
        before = read_acceptance(server.url)
        found = [server.generate(turn, 24)["meta_info"] for turn in turns]
        length = read_acceptance(server.url).since(before).acceptance_length
        assert length is not None
        return length, sum(one["cached_tokens"] for one in found)

    reused, cached = acceptance()
    assert cached > 0.9 * sum(map(len, turns))
    server.get("/flush_cache")
    anew, cached = acceptance()
    assert cached < 0.3 * sum(map(len, turns))  # they begin alike
    assert reused == pytest.approx(anew, rel=0.02)


class Nobody:
    """A subject that must not be asked again what it answered."""

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        raise RefusedError(f"asked again: {len(questions)} questions", where="verify", status=400)

    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics.unknown()

    def wrong_penalties(self) -> str | None:
        return None

    def speculates(self, probe: Question | None = None) -> bool:
        return False


def verification(servers: Fleet[Server], name: str, plan: VerifyPlan) -> tuple[Store, Findings]:
    """A verification of a server against the one that does not speculate."""
    store = Store(None, {})
    speculating, plain = (
        Endpoint(servers[one].ready.result().url, timeout=PATIENCE, concurrency=AT_ONCE) for one in (name, "plain")
    )
    return store, Verification(plan, brief(), two_servers(speculating, plain), store).run()


def test_greedy_and_sampled_decoding_is_lossless_with_penalties_too(servers: Fleet[Server]) -> None:
    found = verification(servers, "narrow", PLAN.model_copy(update={"samples": FEWEST, "sample_tokens": 4}))[1]
    assert found.headline.startswith("lossless: greedy and sampled; not tested: "), found.headline
    assert (found.scope, found.unit) == (("long answers", "seed (not kept without speculation)"), "token ids")
    assert [case.identical for case in found.greedy] == [VERIFIED, VERIFIED]


@pytest.fixture(scope="module")
def verified(servers: Fleet[Server]) -> tuple[Store, Findings]:
    """One verification of all cases."""
    return verification(servers, "DFLASH", PLAN)


def again(store: Store, **changes: Any) -> Findings:
    """What the same answers say under other settings."""
    nobody = SubjectPair(lambda: nullcontext(Nobody()), lambda: nullcontext(Nobody()))
    return Verification(PLAN.model_copy(update=changes), brief(), nobody, store).run()


def test_greedy_decoding_is_lossless(verified: tuple[Store, Findings]) -> None:
    found = again(verified[0], samples=0, penalties=False)
    assert (found.verdict, found.faults, found.unit) == ("lossless", {}, "token ids")
    assert found.greedy[0].identical == VERIFIED
    assert found.acceptance_length is not None
    assert found.acceptance_length > 1.1


def test_what_is_refused_is_not_called_lossless(verified: tuple[Store, Findings]) -> None:
    found = verified[1]
    assert found.verdict == "could not tell"
    assert "does not count the tokens of DFlash steps" in str(found.greedy[1].refused)
    assert all("would answer greedily without saying so" in str(one.refused) for one in found.sampled[: BASE - 1])
    assert sum("`--samples 0` verifies greedy decoding alone" in reason for reason in found.reasons) == BASE - 1


def test_an_update_of_the_targets_weights_leaves_the_drafter_as_it_was(
    prompts: Tokens, plain: Answers, servers: Fleet[Server]
) -> None:
    """As trainers of the target do it; SGLang's own would put the target's layers over the drafter's."""
    server = servers["narrow"].ready.result()
    target = json.loads(server.get("/get_model_info"))["model_path"]
    assert server.post("/update_weights_from_disk", {"model_path": target})["success"]
    before = read_acceptance(server.url)
    assert server.tokens(prompts[:6], TOKENS, 6) == plain.tokens[:6]
    found = read_acceptance(server.url).since(before).acceptance_length
    assert found is not None
    assert found > 1.5

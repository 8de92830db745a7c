"""The real server with SmolLM2-135M-Instruct and the drafter we ship: whatever is asked for, at any width, speculation
changes no token; `verify` says so too; acceptance is the embedded engine's; and the widths follow the load.
"""

from __future__ import annotations

import json
import urllib.error
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_serve import LLM, SamplingParams
from dflash_serve.adapter import counters as ours
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.source import BUNDLED_DRAFTER, target_folder
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.common.store import Store
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.training.answers import AnswerRequest, AnswerServer, ask
from dflash_serve.verify.subjects import ONE_SERVER, one_server, two_servers
from dflash_serve.verify.verification import Verification
from dflash_vllm.facts import ACCEPTED, DRAFTED, DRAFTS, FACTS
from dflash_vllm.settings import static_schedule
from tests.support.fleet import Fleet, ahead, fleet
from tests.support.prompts import brief, word_problems
from tests.support.promql import exported, missing
from tests.support.vllm_server import AT_ONCE, BRIEFLY, CROWD, LIMITS, PATIENCE, OnCpu, Server, serving, smollm2

pytestmark = pytest.mark.model
PROMPTS, TOKENS, STREAMS = 12, 40, 10
FLAT_THEN_STEEP = {"target": {1: 1.0, 8: 1.0, 256: 32.0}, "draft": {1: 0.05, 16: 0.05}}
"""Costs of a machine on which 8 rows cost no more than one, and every further row costs in full."""
SURVIVAL = (0.627, 0.347, 0.202, 0.119, 0.093, 0.073, 0.052)
"""The bundled drafter's, by slot."""
SCHEMA = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
BOUNDED = {"ignore_eos": False}
HITS = "vllm:prefix_cache_hits_total"
"""Tokens of prompts that were not computed again."""
BLOCK = 128
"""Tokens of a block of K/V, on a CPU."""
Tokens = list[list[int]]


def static_flags() -> tuple[str, str]:
    """A schedule of widths worked out before launch, for a vLLM into which nothing of ours is loaded."""
    rows = static_schedule(CostModel.model_validate(FLAT_THEN_STEEP), SURVIVAL, (1, 2, 4, 8), CROWD)
    speculative = {"method": "dflash", "model": str(BUNDLED_DRAFTER), "num_speculative_tokens": 7}
    return "--speculative-config", json.dumps({**speculative, "num_speculative_tokens_per_batch_size": rows})


def write_reduced_drafter(folder: Path) -> Path:
    """The drafter we ship, with a head of its own for most of the target's tokens: its rows, and where they belong."""
    drafter, target = open_checkpoint(BUNDLED_DRAFTER), target_folder("smollm2")
    assert drafter.config is not None
    ids = torch.tensor([token for token in range(drafter.config.vocab_size) if token < 12_288 or token % 3])
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tensors = {
        **load_tensors(drafter),
        "d2t": ids - torch.arange(len(ids)),
        "lm_head.weight": embedding[ids].contiguous(),
    }
    config = drafter.config.model_copy(update={"draft_vocabulary": len(ids)})
    write_drafter(folder, config, tensors, dialect="speculators")
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Fleet[Server]]:
    """Without speculation (`plain`), and at every kind of width."""
    folder = tmp_path_factory.mktemp("smollm2")
    table = folder / "cost.json"
    table.write_text(json.dumps(FLAT_THEN_STEEP))
    costs = {"DFLASH_SERVE_COST_TABLE": str(table)}
    wanted = {
        "plain": (smollm2("off", limits={**LIMITS, "max_batch_size": AT_ONCE}), OnCpu()),
        "full": (smollm2(8), OnCpu()),
        "auto": (smollm2("auto"), OnCpu(env=costs)),
        "3": (smollm2(3, limits={**LIMITS, "max_batch_size": AT_ONCE}), OnCpu()),
        "static": (smollm2(8), OnCpu(*static_flags(), env={"VLLM_PLUGINS": "cpu_repair"})),
        "reduced": (smollm2(8, drafter={"model": str(write_reduced_drafter(folder / "reduced drafter"))}), OnCpu()),
    }
    with fleet(serving, folder, wanted, ahead=ahead(pytestconfig)) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(servers: Fleet[Server]) -> Tokens:
    tokenizer = load_tokenizer("smollm2")
    encoded = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        for messages in word_problems(CROWD)
    ]
    return [list(one["input_ids"]) for one in encoded]


def both(server: Server, bodies: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> Any:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [
            answer["token_ids"] for answer in pool.map(lambda body: server.complete(body[0], 32, **body[1]), bodies)
        ]


def joined(prompts: Tokens) -> list[int]:
    return [token for prompt in prompts for token in prompt]


Ask = Callable[[Server, Tokens], Any]
CASES: Mapping[str, Ask] = {
    "ten streams": lambda server, prompts: server.tokens(prompts[:PROMPTS], TOKENS, STREAMS),
    "one stream": lambda server, prompts: server.tokens(prompts[:2], TOKENS),
    "a crowd": lambda server, prompts: server.tokens(prompts, 24, CROWD),
    "penalties": lambda server, prompts: both(
        server,
        [
            (prompts[0], {"repetition_penalty": 1.3}),
            (prompts[1], {"presence_penalty": 0.8, "frequency_penalty": 0.5}),
            (prompts[2], {"bad_words": [" the"]}),
            (prompts[3], {"allowed_token_ids": list(range(100, 3000))}),
        ],
    ),
    "where an answer ends": lambda server, prompts: both(
        server,
        [
            (prompts[0], {"stop": ["."], **BOUNDED}),
            (prompts[1], {"min_tokens": 20, **BOUNDED}),
            (prompts[2], {"max_tokens": 1}),
            (prompts[3], {"max_tokens": 2}),
        ],
    ),
    "grammars": lambda server, prompts: both(
        server,
        [
            (prompts[0], {"structured_outputs": {"json": SCHEMA}, **BOUNDED}),
            (prompts[1], {"structured_outputs": {"regex": "[0-9]{1,3} (dollars|pages)"}, **BOUNDED}),
            (prompts[2], {"structured_outputs": {"choice": ["yes", "no"]}, **BOUNDED}),
        ],
    ),
    "a prompt in chunks": lambda server, prompts: server.tokens([joined(prompts)[:700]], 24),
    "a prefix from the cache": lambda server, prompts: server.tokens([joined(prompts)[:300] + prompts[3]] * 2, 24),
}  # fmt: skip


def logprobs(server: Server, prompts: Tokens) -> list[float]:
    found: list[float] = server.complete(prompts[0], 24, logprobs=2)["logprobs"]["token_logprobs"]
    return found


@pytest.fixture(scope="module")
def truth(servers: Fleet[Server], prompts: Tokens) -> dict[str, Any]:
    """What the same server answers without speculation."""
    server = servers["plain"].ready.result()
    return {name: ask(server, prompts) for name, ask in CASES.items()} | {"logprobs": logprobs(server, prompts)}


def assert_nothing_changed(server: Server, prompts: Tokens, truth: Mapping[str, Any]) -> None:
    for name, case in CASES.items():
        assert case(server, prompts) == truth[name], name
    assert logprobs(server, prompts) == pytest.approx(truth["logprobs"], abs=1e-3)
    assert (server.samples.total(HITS) or 0) > 0


def assert_it_accepts_as_ours(server: Server, drafter: str, prompts: Tokens, truth: Mapping[str, Any]) -> None:
    """Whole blocks at ten streams: the same tokens, and the embedded engine's acceptance length within 3 %.

    vLLM counts the step that an answer ends with whole, however little of it the answer has room for.
    """
    before = read_acceptance(server.url)
    assert server.tokens(prompts[:PROMPTS], TOKENS, STREAMS) == truth["ten streams"]
    found = read_acceptance(server.url).since(before)
    assert found.widths == {8: found.verifications}
    params = SamplingParams(temperature=0, max_tokens=TOKENS + 8, ignore_eos=True)
    llm = LLM("smollm2", drafter, width=8, max_model_len=1024, max_batch_size=STREAMS)
    gained: dict[int, list[int]] = defaultdict(list)
    for chunk in llm.stream(prompts[:PROMPTS], params):
        gained[chunk.index].append(len(chunk.token_ids))
    ours = [tokens for answer in gained.values() for tokens in steps_within(answer, TOKENS)]
    assert found.verifications == pytest.approx(len(ours), rel=0.03)
    assert found.acceptance_length == pytest.approx(fmean(ours), rel=0.03)


def steps_within(gained: Sequence[int], limit: int) -> Iterator[int]:
    """Tokens of the decoding steps that begin with fewer than `limit`; the first of `gained` is the prompt's own."""
    total = gained[0]
    for tokens in gained[1:]:
        if total >= limit:
            return
        yield tokens
        total += tokens


def assert_a_cached_prompt_is_drafted_from_as_a_new_one(server: Server, prompt: Sequence[int]) -> None:
    """A prompt of which three blocks lie in the prefix cache, then the same where a salt keeps it from being found."""
    hits, accepted = [], []
    for salt in ({}, {"cache_salt": "new"}):
        before, counted = read_acceptance(server.url), server.samples.total(HITS) or 0
        server.complete(prompt, TOKENS, **salt)
        hits.append((server.samples.total(HITS) or 0) - counted)
        accepted.append(read_acceptance(server.url).since(before).acceptance_length)
    assert hits == [3 * BLOCK, 0]
    assert accepted[0] == pytest.approx(accepted[1], rel=0.02)


@pytest.mark.thorough
def test_whole_blocks_change_no_token_and_accept_what_the_embedded_engine_does(
    servers: Fleet[Server], prompts: Tokens, truth: dict[str, Any]
) -> None:
    server = servers["full"].ready.result()
    assert_it_accepts_as_ours(server, str(server.folder / "draft"), prompts, truth)
    assert_nothing_changed(server, prompts, truth)
    long = joined(prompts)[5:][: 3 * BLOCK + 1]
    server.complete(long, 1)
    assert_a_cached_prompt_is_drafted_from_as_a_new_one(server, long)


@pytest.mark.thorough
def test_a_head_for_a_part_of_the_tokens_drafts_as_ours(
    servers: Fleet[Server], prompts: Tokens, truth: dict[str, Any]
) -> None:
    server = servers["reduced"].ready.result()
    assert_it_accepts_as_ours(server, str(server.folder / "draft"), prompts, truth)
    servers["reduced"].left.set()


@pytest.mark.thorough
def test_answers_to_train_on_are_the_servers_and_end_with_their_stop_token(
    servers: Fleet[Server], prompts: Tokens
) -> None:
    server = servers["full"].ready.result()
    (answer,) = server.tokens(prompts[:1], TOKENS)
    stop = next(token for at, token in enumerate(answer) if at > 7 and token not in answer[:at])
    params = SamplingParams(temperature=0, max_tokens=len(answer), stop_token_ids=(stop,))
    answering = AnswerServer(server.url, load_tokenizer("smollm2"), 1)
    (found,) = ask(answering, iter([AnswerRequest(0, tuple(prompts[0]), params)]), 1)
    assert (found.tokens, found.ended) == (answer[: answer.index(stop) + 1], True)


@pytest.mark.thorough
def test_what_vllm_counts_is_what_we_count(servers: Fleet[Server], prompts: Tokens) -> None:
    server = servers["full"].ready.result()
    server.tokens(prompts[:3], 16, 3)
    now = server.samples
    widths = now.by(f"{ours.STEPS}_total", "width")
    assert sum(count for width, count in widths.items() if width > 1) == now.total(DRAFTS)
    assert now.total(f"{ours.OFFERED}_total") == now.total(DRAFTED)
    assert now.total(f"{ours.ACCEPTED}_total") == now.total(ACCEPTED)
    survival = now.by_slot(f"{ours.ACCEPTED}_total", "slot", first=1)
    assert all(wider <= narrower for narrower, wider in pairwise(survival))


@pytest.mark.thorough
def test_what_vllm_does_not_do_with_speculation_it_says(servers: Fleet[Server], prompts: Tokens) -> None:
    for asked in ({"min_p": 0.1, "temperature": 0.5}, {"logit_bias": {"5": 3}}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            servers["full"].ready.result().complete(prompts[0], 8, **asked)
        assert refused.value.code == 400
        assert "not yet supported with speculative decoding" in refused.value.read().decode()


@pytest.mark.thorough
def test_it_exports_all_that_the_dashboard_asks_of_it_and_routers_look_for(servers: Fleet[Server]) -> None:
    server, metrics = servers["full"].ready.result(), FACTS.metrics
    page = exported(server.get(metrics.path))
    assert missing("vllm", page) == []
    assert {metrics.queued, metrics.running, metrics.kv_cache_usage} <= set(page)
    for path in (FACTS.probes.started, FACTS.probes.live, FACTS.probes.ready):
        server.get(path)  # an HTTP error raises
    servers["full"].left.set()


@pytest.mark.thorough
def test_verify_finds_greedy_lossless_and_sampling_without_a_difference(servers: Fleet[Server]) -> None:
    both = [servers[name] for name in ("3", "plain")]
    urls = [berth.ready.result().url for berth in both]
    pair = two_servers(*(Endpoint(url, timeout=PATIENCE, concurrency=AT_ONCE) for url in urls))
    found = Verification(BRIEFLY, brief(), pair, Store(None, {})).run()
    assert (found.faults, found.reasons) == ({}, ())
    assert (found.verdict, found.unit) == ("lossless", "token ids")
    assert all(one.identical == 4 for one in found.greedy)


OWN = ("off", 3, "auto", None)


@pytest.mark.thorough
def test_a_request_may_switch_speculation_off_or_narrow_it_where_widths_change(
    servers: Fleet[Server], prompts: Tokens, truth: dict[str, Any]
) -> None:
    """Requests with widths of their own run beside others in the same steps."""
    server = servers["auto"].ready.result()
    before = read_acceptance(server.url)
    off = [server.complete(prompt, TOKENS, vllm_xargs={"speculative": "off"}) for prompt in prompts[:2]]
    assert [answer["token_ids"] for answer in off] == truth["one stream"]
    assert {width for width, count in since(server, before).items() if count} == {1}
    before = read_acceptance(server.url)
    more: list[dict[str, Any]] = [{"vllm_xargs": {"speculative": one}} if one else {} for one in OWN]
    with ThreadPoolExecutor(len(OWN)) as pool:
        found = list(pool.map(lambda one: server.complete(one[0], TOKENS, **one[1]), zip(prompts, more, strict=False)))
    alone = [server.complete(prompt, TOKENS)["token_ids"] for prompt in prompts[: len(OWN)]]
    assert [answer["token_ids"] for answer in found] == alone
    assert since(server, before)[1] >= TOKENS - 1
    for name, asked, said in (("auto", 9, "a number of slots from 1 to 8"), ("3", "off", "a width of this request")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            servers[name].ready.result().complete(prompts[0], 8, vllm_xargs={"speculative": asked})
        assert refused.value.code == 400
        assert said in refused.value.read().decode()


def since(server: Server, before: AcceptanceStatistics) -> dict[int, float]:
    widths = read_acceptance(server.url).since(before).widths
    assert widths is not None
    return widths


@pytest.mark.thorough
def test_verify_compares_one_server_with_itself(servers: Fleet[Server]) -> None:
    endpoint = Endpoint(servers["auto"].ready.result().url, timeout=PATIENCE, concurrency=4)
    plan = BRIEFLY.model_copy(update={"samples": 0, "penalties": False})
    found = Verification(plan, brief(), one_server(endpoint), Store(None, {})).run()
    assert (found.faults, found.reasons, found.verdict) == ({}, (), "lossless")
    assert ONE_SERVER in found.headline


def mean_width(statistics: AcceptanceStatistics) -> float:
    assert statistics.widths is not None
    steps = sum(statistics.widths.values())
    return sum(width * count for width, count in statistics.widths.items()) / steps


@pytest.mark.thorough
def test_widths_follow_the_load_and_come_back_and_no_token_changes(
    servers: Fleet[Server], prompts: Tokens, truth: dict[str, Any]
) -> None:
    server, seen = servers["auto"].ready.result(), []
    for streams in (1, CROWD, 1):
        before = read_acceptance(server.url)
        few = streams == 1
        asked, tokens = (prompts[:2], TOKENS) if few else (prompts, 24)
        assert server.tokens(asked, tokens, streams) == truth["one stream" if few else "a crowd"]
        seen.append(read_acceptance(server.url).since(before))
    alone, crowd, again = seen
    assert mean_width(alone) > 6
    assert mean_width(crowd) < 2
    assert crowd.widths is not None
    assert crowd.widths.get(1, 0) > 0.7 * sum(crowd.widths.values())  # off
    assert mean_width(again) > 6
    assert again.acceptance_length == pytest.approx(alone.acceptance_length, rel=0.05)
    assert_nothing_changed(server, prompts, truth)
    long = joined(prompts)[7:][: 3 * BLOCK + 1]
    server.tokens([long, *prompts], 24, CROWD)  # off: what the drafter would read of it waits
    assert_a_cached_prompt_is_drafted_from_as_a_new_one(server, long)
    servers["auto"].left.set()


@pytest.mark.thorough
def test_a_narrow_width_changes_no_token(servers: Fleet[Server], prompts: Tokens, truth: dict[str, Any]) -> None:
    server = servers["3"].ready.result()
    before = read_acceptance(server.url)
    assert_nothing_changed(server, prompts, truth)
    widths = read_acceptance(server.url).since(before).widths
    assert widths is not None
    assert max(widths) == 3
    servers["3"].left.set()


@pytest.mark.thorough
def test_a_static_schedule_needs_nothing_of_ours_inside_vllm(
    servers: Fleet[Server], prompts: Tokens, truth: dict[str, Any]
) -> None:
    server = servers["static"].ready.result()
    assert server.tokens(prompts[:2], TOKENS) == truth["one stream"]
    assert (server.samples.total(DRAFTS) or 0) > 20

    def drafts_of_a_crowd() -> float:
        before = server.samples.total(DRAFTS) or 0
        assert server.tokens(prompts, 24, CROWD) == truth["a crowd"]
        return (server.samples.total(DRAFTS) or 0) - before

    # Off, but for the first and last few requests: on a busy machine they may all come one after the other.
    assert any(drafts_of_a_crowd() < 0.3 * CROWD * 24 / 2.5 for _ in range(3))
    assert not server.samples.knows(f"{ours.STEPS}_total")

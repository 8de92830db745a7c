"""The real server with tiny Qwen3 and Qwen3.5 (recurrent layers) pairs: whatever is asked for, speculation changes no
token and leaks no K/V entry; and it exports all that the dashboard asks of it, and what routers are told to look for.
"""

from __future__ import annotations

import json
import random
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.counters import ACCEPTED, STEPS
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.variables import COST_TABLE
from dflash_sglang.facts import DRAFT_SECONDS, FACTS
from tests.support.fleet import Berth, Fleet, ahead, fleet
from tests.support.promql import exported, missing
from tests.support.sglang_server import OnCpu, Server, deployment, serving, tiny_pair
from tests.support.tiny import write_tiny_drafter

PROMPTS = [
    "the quick brown fox",
    '{"name": [1',
    "over the lazy dog jumps",
    "fox fox fox",
    "true false",
    "a",
    "dog",
    "[",
]
LONG = "the quick brown fox jumps over the lazy dog " * 4
PREFIX = LONG * 2
"""Longer than the largest page."""
BLOCK = 16
CONTEXT = 512
SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]})
IN_STEP = "--disable-overlap-schedule"
HYBRID = "qwen3_5_text"
STATES = ("--max-mamba-cache-size", "64")
"""Recurrent states that SGLang keeps; its own number fills the memory."""
PLAIN = {"qwen3": (IN_STEP,), HYBRID: (IN_STEP, "--mamba-radix-cache-strategy", "no_buffer", *STATES)}
"""Flags of the server without speculation, by family of the target.

With overlapped scheduling SGLang's plain decoding penalises a token by those before the last one only. With recurrent
layers its other strategy pins memory, which a CPU cannot.
"""
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
SLOW_TOKENIZERS = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"}
"""Seconds; they import longer than the 5 that they are given."""
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
CHEAP = {"target": {1: 1.0, 64: 1.1}, "draft": {1: 0.01, 8: 0.01}}
"""Costs at which it pays to verify whatever is drafted."""


@dataclass(frozen=True)
class Way:
    """Of serving with speculation."""

    speculation: dict[str, Any]
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    family: str = "qwen3"
    cost: object = None
    counts_penalties: bool = True
    samples: bool = True


def mixed(page: int) -> tuple[str, ...]:
    """Prompts in chunks of two pages or 8 tokens, beside requests that decode."""
    return "--page-size", str(page), "--chunked-prefill-size", str(max(8, 2 * page)), "--enable-mixed-chunk"


STEPS_FILE = "steps.json"
MEASURED = Way({"width": "auto"}, mixed(64), STRICT)
WAYS = {
    "DFLASH, two tokenizers, no sampling kernel": Way(
        {"width": BLOCK},
        ("--tokenizer-worker-num", "2"),
        {**STRICT, **SLOW_TOKENIZERS, "SGLANG_CPU_SAMPLING": "absent"},
        counts_penalties=False,
        samples=False,
    ),
    "automatic, retracting, windowed": Way(
        {"width": "auto", "draft_window": 16}, ("--page-size", "1"), {**STRICT, **RETRACTING}, cost=CHEAP
    ),
    "automatic, measured, paged, chunked": MEASURED,
    "narrow, paged, windowed, chunked, in step": Way({"width": 3, "draft_window": 16}, (*mixed(16), IN_STEP), STRICT),
    "two ranks": Way({"width": "auto"}, env=STRICT, ranks=2, cost=CHEAP),
    "two ranks, one short of memory": Way({"width": "auto"}, env={"SGLANG_CPU_FAULT": "memory:1"}, ranks=2, cost=CHEAP),
    "two ranks, one of which fails, paged": Way(
        {"width": 3}, ("--page-size", "16"), env={"SGLANG_CPU_FAULT": "width 3:1"}, ranks=2
    ),
    "hybrid, automatic, retracting": Way(
        {"width": "auto"}, STATES, {**STRICT, **RETRACTING}, family=HYBRID, cost=CHEAP
    ),
    "hybrid, narrow, chunked": Way({"width": 3}, (*STATES, "--chunked-prefill-size", "64"), STRICT, family=HYBRID),
}


DAILY = "automatic, retracting, windowed"
"""The way that `make test` tries."""
THOROUGH = pytest.mark.thorough


def started(way: Way, models: tuple[Path, Path], folder: Path) -> tuple[Deployment, OnCpu]:
    """The way's deployment, and the backend that serves it."""
    env = dict(way.env)
    if way == MEASURED:
        env["SGLANG_CPU_STEPS"] = str(folder / STEPS_FILE)
    if way.cost is not None:
        env[COST_TABLE] = str(folder / "cost.json")
        Path(env[COST_TABLE]).write_text(json.dumps(way.cost))
    if way.ranks > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    return deployment(models, way.ranks, **way.speculation), OnCpu(*way.flags, env=env)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Fleet[Server]]:
    """One without speculation for each family, and one for each of the ways."""
    folder, wanted = tmp_path_factory.mktemp("tiny"), {}
    for family, flags in PLAIN.items():
        target, config = tiny_pair(folder / family, BLOCK, family)
        models = target, write_tiny_drafter(folder / family / "drafter", config)
        wanted[family] = deployment(models, width="off"), OnCpu(*flags)
        wanted |= {name: started(way, models, folder) for name, way in WAYS.items() if way.family == family}
    with fleet(serving, folder, wanted, ahead=ahead(pytestconfig)) as running:
        yield running


@pytest.fixture(scope="module")
def truths() -> dict[str, dict[str, Any]]:
    """Answers without speculation by family of the target."""
    return {}


@pytest.fixture(scope="module")
def truth(way: Way, truths: dict[str, dict[str, Any]], servers: Fleet[Server]) -> dict[str, Any]:
    """What the same server answers without speculation."""
    if way.family not in truths:
        truths[way.family] = answers_of(servers[way.family])
    return truths[way.family]


def answers_of(berth: Berth[Server]) -> dict[str, Any]:
    server = berth.ready.result()
    logprobs = server.generate(PROMPTS[0], return_logprob=True)["meta_info"]["output_token_logprobs"]
    found = {
        "tokens": server.tokens(PROMPTS, streams=8),
        "long": server.generate(PREFIX)["output_ids"],
        "logprobs": [entry[0] for entry in logprobs],
        "schema": server.generate(PROMPTS[1], 40, json_schema=SCHEMA, ignore_eos=False)["text"],
        "penalised": penalised(server),
        "to the end": to_the_end(server),
    }
    berth.left.set()
    return found


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"min_new_tokens": 12, "ignore_eos": False},
    {},
]


NEARLY_GREEDY: dict[str, Any] = {"temperature": 1e-5}
ONE_IS_LEFT = {"temperature": 1.5, "min_p": 1.0}
"""Only the most probable token; SGLang 0.5.23 leaves min_p out of speculative steps."""
"""The most probable token by far, but found by sampling."""


def penalised(server: Server, **how: Any) -> list[list[int]]:
    """Answers with penalties, and one without among them, all at once."""
    asked = [(prompt, {**more, **how}) for prompt in PROMPTS[:3] for more in PENALTIES]
    with ThreadPoolExecutor(len(asked)) as pool:
        return [answer["output_ids"] for answer in pool.map(lambda one: server.generate(one[0], 40, **one[1]), asked)]


def to_the_end(server: Server) -> list[list[int]]:
    """Answers that fill the context, some at once: rows of requests lie side by side in one table."""

    def to_the_end_of(prompt: str) -> list[int]:
        taken = server.generate(prompt, 1)["meta_info"]["prompt_tokens"]
        tokens: list[int] = server.generate(prompt, CONTEXT - taken)["output_ids"]
        return tokens

    prompts = [LONG * 11 + end for end in PROMPTS[2:5]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(to_the_end_of, prompts))


@pytest.fixture(scope="module", params=[name if name == DAILY else pytest.param(name, marks=THOROUGH) for name in WAYS])
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def server(way: Way, servers: Fleet[Server]) -> Iterator[Server]:
    berth = next(servers[name] for name, one in WAYS.items() if one is way)
    yield berth.ready.result()
    berth.left.set()


@pytest.mark.parametrize("streams", [1, 8])
def test_greedy_answers_are_those_without_speculation(server: Server, truth: dict[str, Any], streams: int) -> None:
    assert server.tokens(PROMPTS, streams=streams) == truth["tokens"]


def test_a_prefix_from_the_cache_changes_nothing(server: Server, truth: dict[str, Any]) -> None:
    server.generate(PREFIX)
    again = server.generate(PREFIX)
    assert again["output_ids"] == truth["long"]
    assert again["meta_info"]["cached_tokens"] > 0


def test_logprobs_are_those_without_speculation(server: Server, truth: dict[str, Any]) -> None:
    answer = server.generate(PROMPTS[0], return_logprob=True)
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(truth["logprobs"], abs=1e-4)


def test_a_json_schema_is_kept_to(server: Server, truth: dict[str, Any]) -> None:
    answer = server.generate(PROMPTS[1], 40, json_schema=SCHEMA, ignore_eos=False)
    assert answer["text"] == truth["schema"]


def test_sampled_requests_are_answered_or_refused_where_they_would_be_answered_greedily(
    server: Server, way: Way, truth: dict[str, Any]
) -> None:
    if way.samples:
        sampled = [{"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9, "top_k": 20}, {"temperature": 1}, {}] * 2
        with ThreadPoolExecutor(len(PROMPTS)) as pool:  # greedy requests beside sampled ones, in the same steps
            asked = list(zip(PROMPTS, sampled, strict=True))
            found = list(pool.map(lambda one: server.generate(one[0], **one[1])["output_ids"], asked))
        assert [len(tokens) for tokens in found] == [24] * 8
        greedy = [at for at, how in enumerate(sampled) if not how]
        assert [found[at] for at in greedy] == [truth["tokens"][at] for at in greedy]
        assert len({tuple(server.generate(PROMPTS[0], temperature=1.5)["output_ids"]) for _ in range(3)}) > 1
        return
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.generate("the", temperature=0.8)
    assert refused.value.code == 400
    assert "would answer greedily without saying so" in refused.value.read().decode()


def test_penalties_are_counted_as_without_speculation_or_refused(
    server: Server, way: Way, truth: dict[str, Any]
) -> None:
    if way.counts_penalties:
        assert penalised(server) == truth["penalised"]
        assert penalised(server, **NEARLY_GREEDY) == truth["penalised"]
        return
    for asked in PENALTIES[:3]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.generate("the", **asked)
        assert refused.value.code == 400
        assert f"does not count the tokens of DFlash steps for {next(iter(asked))}" in refused.value.read().decode()


def with_own_width(asked: object) -> dict[str, Any]:
    return {"custom_params": {"speculative": asked}}


def test_a_request_may_switch_speculation_off_or_narrow_it_where_widths_change(
    server: Server, way: Way, truth: dict[str, Any]
) -> None:
    """Requests with widths of their own run beside others in the same steps."""
    if way.speculation["width"] != "auto" or "SGLANG_CPU_FAULT" in way.env:
        for asked in ("off", 2):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.generate("the", **with_own_width(asked))
            assert refused.value.code == 400
            assert "custom_params.speculative" in refused.value.read().decode()
        return
    before = server.samples.by(f"{STEPS}_total", "width")
    own: tuple[int | str | None, ...] = ("off", 3, None, "auto") * 2
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt, one: server.generate(prompt, **with_own_width(one)), PROMPTS, own))
    assert [answer["output_ids"] for answer in found] == truth["tokens"]
    for one, answer in zip(own, found, strict=True):
        told = answer["meta_info"]
        if one == "off":
            assert told["spec_num_correct_drafts"] == 0
            assert (
                12 <= told["spec_verify_ct"] <= told["completion_tokens"] - 1
            )  # a retracted request is prefilled again
        elif one == 3:
            assert told["spec_num_correct_drafts"] <= 2 * told["spec_verify_ct"]
    after = server.samples.by(f"{STEPS}_total", "width")
    widths = {width: count - before.get(width, 0) for width, count in after.items()}
    assert widths[1] >= sum(answer["meta_info"]["spec_verify_ct"] for answer in found[::4])
    assert penalised(server, **with_own_width("off")) == truth["penalised"]
    assert penalised(server, **with_own_width("off"), **NEARLY_GREEDY) == truth["penalised"]
    for asked, said in ((BLOCK + 1, f"from 1 to {BLOCK}"), ("no", "neither auto, off nor a number")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.generate("the", **with_own_width(asked))
        assert refused.value.code == 400
        assert said in refused.value.read().decode()


def test_penalties_matter_here(truth: dict[str, Any]) -> None:
    """Else the test above could not fail."""
    for at in range(3):
        assert all(truth["penalised"][at * 4 + i] != truth["penalised"][at * 4 + 3] for i in (0, 1))


def test_sampling_finds_the_most_probable_tokens_where_nothing_else_is_probable(
    server: Server, way: Way, truth: dict[str, Any]
) -> None:
    if way.samples:
        asked = [(prompt, how) for how in (NEARLY_GREEDY, ONE_IS_LEFT) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(lambda one: server.generate(one[0], **one[1])["output_ids"], asked))
        assert found == 2 * truth["tokens"]


def test_requests_that_fill_the_context_write_into_their_own_rows_only(server: Server, truth: dict[str, Any]) -> None:
    assert to_the_end(server) == truth["to the end"]
    assert server.tokens(PROMPTS, streams=8) == truth["tokens"]
    assert_nothing_leaks(server)


def test_a_rank_that_fails_alone_leaves_whole_blocks_on_all(server: Server, way: Way) -> None:
    if "SGLANG_CPU_FAULT" not in way.env:
        pytest.skip("nothing fails here")
    server.tokens(PROMPTS[:2])
    assert set(server.samples.by(f"{STEPS}_total", "width")) == {BLOCK}


def test_a_storm_of_clients_that_hang_up_leaks_nothing(server: Server, truth: dict[str, Any]) -> None:
    luck = random.Random(0)

    def ask(number: int) -> None:
        answer = server.stream(PROMPTS[number % len(PROMPTS)], 60, rid=f"storm-{number}")
        for _ in range(luck.randrange(1, 12)):
            next(answer, None)
        answer.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))
    server.post("/abort_request", {"rid": "", "abort_all": True})
    server.tokens(PROMPTS, streams=8)  # with two tokenizers the abortion may come as late as these
    assert server.tokens(PROMPTS, streams=8) == truth["tokens"]
    assert_nothing_leaks(server)


def assert_nothing_leaks(server: Server) -> None:
    """Every K/V entry is free, or kept for prefixes (/get_server_info has no usage in 0.5.23, /metrics has)."""
    assert server.settled("sglang:num_running_reqs", 0)
    assert server.settled("sglang:kv_used_tokens", 0)
    free = server.metric("sglang:kv_available_tokens") + server.metric("sglang:kv_evictable_tokens")
    assert server.metric("sglang:max_total_num_tokens") in (free, 2 * free)  # each rank tells it, the rest only one


def test_aborted_in_mid_stream_nothing_leaks(server: Server, truth: dict[str, Any]) -> None:
    for attempt in range(4):  # on a busy machine an answer may end before we come to abort it
        answer = server.stream(LONG, 300, rid=f"doomed-{attempt}")
        next(answer)
        server.post("/abort_request", {"rid": f"doomed-{attempt}"})
        last = list(answer)[-1]["meta_info"]
        if last["finish_reason"]["type"] == "abort":
            break
    assert last["finish_reason"]["type"] == "abort"
    assert 0 < last["completion_tokens"] < 300
    assert server.tokens(PROMPTS[:3]) == truth["tokens"][:3]
    assert_nothing_leaks(server)


def test_what_sglang_reports_is_what_we_count(server: Server) -> None:
    def ours() -> tuple[float, float]:
        return server.metric(f"{STEPS}_total"), server.metric(f"{ACCEPTED}_total")

    before = ours()
    answers = [server.generate(prompt)["meta_info"] for prompt in PROMPTS[:4]]
    steps, accepted = (now - then for now, then in zip(ours(), before, strict=True))
    assert steps == sum(answer["spec_verify_ct"] for answer in answers)
    assert accepted == sum(answer["spec_num_correct_drafts"] for answer in answers)


def test_the_drafters_time_is_measured(server: Server, way: Way) -> None:
    if way == MEASURED:
        pytest.skip("by its costs a draft may never pay")
    assert server.metric(f"{DRAFT_SECONDS}_sum") > 0


def test_a_narrow_step_launches_as_few_kernels_as_sglangs_own(server: Server, way: Way) -> None:
    if way != MEASURED:
        pytest.skip("not counted here")
    for parts in json.loads((server.folder.parent / STEPS_FILE).read_text()).values():
        (_, own), (_, narrow), *_ = parts.values()
        assert narrow <= own + 3, parts


def test_dashboards_routers_and_probes_find_what_they_look_for(server: Server) -> None:
    assert list(server.stream(PROMPTS[0], 32))  # only a stream has a time between tokens
    found, metrics = exported(server.get(FACTS.metrics.path)), FACTS.metrics
    assert missing("sglang", found) == []
    assert {metrics.queued, metrics.running, metrics.kv_cache_usage, metrics.acceptance_length} <= set(found)
    for path in (FACTS.probes.started, FACTS.probes.live, FACTS.probes.ready):
        server.get(path)  # an HTTP error raises

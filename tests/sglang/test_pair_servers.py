"""SGLang's real router before two real servers, and before two real halves of a pair.

No token changes and no acceptance is lost; a client that hangs up frees all servers; a server that is killed costs no
answer, and a half that starts again serves again; a prefill half without the drafter is refused.

Seven servers start, two at a time, and at most three run, of 3 GB each: `make test-distributed`, which shows figures.
"""

from __future__ import annotations

import os
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import MetricsSource, read_acceptance
from dflash_serve.common.processes import free_port
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from tests.support.children import gigabytes, kill
from tests.support.counted_answers import Answers
from tests.support.fleet import Fleet, ahead, fleet
from tests.support.prompts import word_problems
from tests.support.sglang_pair import half
from tests.support.sglang_router import router_of_a_pair, running_router
from tests.support.sglang_server import FORKED, OnCpu, Server, serving, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("DFLASH_SERVE_TEST_DISTRIBUTED" not in os.environ, reason="make test-distributed"),
]
TOKENS = 32
CHATS = word_problems(4)
PROMPTS = ["".join(f"{one['content']}\n" for one in chat) for chat in CHATS]
STORY = [{"role": "user", "content": "Tell me a long story about a fox."}]
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PREFILL, DECODE, MEETING = free_port(), free_port(), free_port()
"""Ports of the halves, and the one where they meet: a half that starts again has them, too."""
MEETING_OF_BARE = free_port()


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    """Two servers, two halves of a pair, and a prefill half without the drafter."""
    bare = smollm2("off").model_copy(update={"drafter": None})
    wanted = {
        "first": (smollm2(8), OnCpu(env=FORKED)),
        "second": (smollm2(8), OnCpu(env=FORKED, port=free_port())),
        "prefill": half(smollm2(8), "prefill", MEETING, PREFILL),
        "decode": half(smollm2(8), "decode", MEETING, DECODE),
        # a prefill half keeps a request that the other half refused for 300 s, and the router waits for both
        "bare": half(bare, "prefill", MEETING_OF_BARE, SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="5"),
    }
    with fleet(serving, tmp_path_factory.mktemp("servers"), wanted, ahead=ahead(request.config)) as running:
        yield running


@pytest.fixture(scope="module")
def replacements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    """Halves at the addresses of the first ones."""
    ports = {"prefill": PREFILL, "decode": DECODE}
    # so long is a request kept that reaches the router between a decode half's death and its next look; else 300 s
    soon = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30"}
    wanted = {role: half(smollm2(8), role, MEETING, port, **soon) for role, port in ports.items()}
    with fleet(serving, tmp_path_factory.mktemp("replacements"), wanted, ahead=0) as running:
        yield running


@pytest.fixture(scope="module")
def whole(servers: Fleet[Server]) -> Answers:
    """The first server's answers, asked directly."""
    first = servers["first"].ready.result()
    return Answers.of(first, first.url, PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def pair(servers: Fleet[Server], whole: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang's router before both halves, as one server."""
    for name in servers.berths.keys() & {"first", "second"}:
        servers[name].left.set()
    prefill, decode = (servers[name].ready.result() for name in ("prefill", "decode"))
    folder = tmp_path_factory.mktemp("router")
    with router_of_a_pair(prefill.url, MEETING, decode.url, folder / "log") as url:
        yield Server(url, folder)


def test_two_servers_behind_the_router_answer_and_accept_as_one_does(
    servers: Fleet[Server], whole: Answers, tmp_path: Path
) -> None:
    first, second = (servers[name].ready.result() for name in ("first", "second"))
    with running_router([first.url, second.url], tmp_path / "log") as url:
        router = Server(url, tmp_path)
        each = MetricsSource(url).require().workers
        assert each is not None
        assert {(name, one.engine) for name, one in each.items()} == {
            (server.url, "SGLang with dflash-serve") for server in (first, second)
        }
        found = Answers.of(router, url, PROMPTS, TOKENS)
        print(f"router, two servers: {gigabytes():.1f} GB, acceptance {found.told}; one server {whole.told}")
        assert found == whole
        with closing(router.stream(PROMPTS[0], 400)) as stream:
            next(stream)
        assert all(server.settled("sglang:num_running_reqs", 0) for server in (first, second))
        _a_killed_server_costs_no_answer(Endpoint(url), first, second)


def _a_killed_server_costs_no_answer(router: Endpoint, first: Server, second: Server) -> None:
    undisturbed = Endpoint(first.url).complete(STORY, LONG).text
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(router.complete, STORY, LONG, {"stream": True}) for _ in range(2)]
        assert second.settled("sglang:num_running_reqs", 1)
        killed = time.monotonic()
        kill("--port", second.url.rpartition(":")[2])
        assert [one.result().text for one in asked] == [undisturbed] * 2
    print(f"router, a server killed: both streams whole {time.monotonic() - killed:.1f} s later")


def test_a_pair_answers_and_accepts_as_one_server_does(servers: Fleet[Server], whole: Answers, pair: Server) -> None:
    found = Answers.of(pair, servers["decode"].ready.result().url, PROMPTS, TOKENS)
    print(f"pair: {gigabytes():.1f} GB, acceptance {found.told}; one server {whole.told}")
    assert found == whole
    assert MetricsSource(pair.url).require().acceptance == read_acceptance(servers["decode"].ready.result().url)


def test_a_client_that_hangs_up_frees_both_halves(servers: Fleet[Server], pair: Server) -> None:
    halves = [servers[name].ready.result() for name in ("prefill", "decode")]
    with closing(pair.stream(PROMPTS[0], 400)) as stream:
        next(stream)
        assert halves[1].settled("sglang:num_running_reqs", 1)
    assert all(server.settled("sglang:num_running_reqs", 0) for server in halves)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2, "temperature": 0.8}, "the halves of a pair answer one choice a request"),
        ({"presence_penalty": 0.5}, "does not count the tokens of DFlash steps for presence_penalty"),
    ],
)
def test_a_pair_refuses_in_one_line_what_it_cannot_answer(pair: Server, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        pair.post("/v1/chat/completions", {"model": "smollm2", "messages": CHATS[0], "max_tokens": 8, **fields})
    assert refused.value.code == 400
    assert said in refused.value.read().decode()


def test_a_prefill_half_that_starts_again_serves_again_and_one_without_the_drafter_is_refused_meanwhile(
    servers: Fleet[Server], replacements: Fleet[Server], pair: Server, whole: Answers, tmp_path: Path
) -> None:
    kill("--port", str(PREFILL))
    servers["prefill"].left.set()
    again, decode = replacements["prefill"].ready, servers["decode"].ready.result()
    bare = servers["bare"].ready.result()
    said = f"the prefill half at 127.0.0.1:{MEETING_OF_BARE} runs no drafter, this decode half DFLASH"
    with router_of_a_pair(bare.url, MEETING_OF_BARE, decode.url, tmp_path / "log") as url:
        assert said in _answered(Server(url, tmp_path))
    assert said in Path(decode.folder, "server.log").read_text()
    servers["bare"].left.set()
    again.result()
    _wait_for_answers(pair, "prefill")
    assert Answers.of(pair, decode.url, PROMPTS, TOKENS) == whole


def test_a_decode_half_that_is_killed_ends_its_stream_with_an_error_and_serves_again_when_it_starts_again(
    servers: Fleet[Server], replacements: Fleet[Server], pair: Server, whole: Answers
) -> None:
    decode = servers["decode"].ready.result()
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(Endpoint(pair.url).complete, STORY, LONG, {"stream": True})
        assert decode.settled("sglang:num_running_reqs", 1)
        kill("--port", str(DECODE))
        with pytest.raises(UserError) as refused:
            cut.result()
    print(f"pair, decode half killed: its stream ends with {refused.value}")
    servers["decode"].left.set()
    again = replacements["decode"].ready.result()
    _wait_for_answers(pair, "decode")
    assert Answers.of(pair, again.url, PROMPTS, TOKENS) == whole


def _wait_for_answers(pair: Server, killed: str) -> None:
    ready = time.monotonic()
    while "output_ids" not in _answered(pair):
        assert time.monotonic() < ready + 300
        time.sleep(1)
    print(f"pair, {killed} half killed: answers {time.monotonic() - ready:.1f} s after a new one is ready")


def _answered(pair: Server) -> str:
    """The pair's answer to a short request, or its refusal."""
    try:
        return str(pair.generate(PROMPTS[0], 2))
    except urllib.error.HTTPError as error:
        return error.read().decode()

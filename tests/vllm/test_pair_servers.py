"""vLLM's real router before a real server, and before two real halves of a pair, whose K/V goes by NIXL.

`verify` and the doctor look through it; no token of a pair changes and no acceptance is lost; a client that hangs up
frees both halves; a half that is killed and starts again serves again, and one without the drafter is refused.

Six servers start, and at most three run, of 4 GB each: `make test-distributed`, which shows figures.
EMBEDDED_PYTHON is a Python that has the embedded engine's server.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import MetricsSource, read_acceptance
from dflash_serve.common.processes import free_port, running
from dflash_serve.doctor.evidence import interview
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.report import VerifyReport
from tests.support.children import kill
from tests.support.command_line import call
from tests.support.counted_answers import Answers
from tests.support.fleet import Fleet, fleet
from tests.support.prompts import word_problems
from tests.support.sglang_router import VLLM, router_of_a_vllm_pair, running_router
from tests.support.vllm_pair import half, serving_prepared
from tests.support.vllm_server import PATIENCE, OnCpu, Server, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("DFLASH_SERVE_TEST_DISTRIBUTED" not in os.environ, reason="make test-distributed"),
]
BLOCK, TOKENS = 8, 32
CHATS = word_problems(4)
SHORT = ["".join(f"{one['content']}\n" for one in chat) for chat in CHATS]
PROMPTS = [*SHORT, "".join(SHORT) * 2]
"""The last one takes several blocks of K/V, and several steps."""
SEEDED = {"temperature": 0.8, "seed": 7}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
QUICK = ("--samples", 0, "--max-tokens", 16, "--long-tokens", 0, "--no-penalties", "--concurrency", 2)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PREFILL, DECODE = free_port(), free_port()
"""Ports of the halves: one that starts again has the same."""
LOADED = "vllm:external_prefix_cache_hits_total"
"""Tokens of prompts whose K/V another half has computed."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet[Server]]:
    """One server, a pair, a prefill half without the drafter, and halves in the place of the first ones."""
    folder = tmp_path_factory.mktemp("servers")
    wanted = {
        "whole": (smollm2(BLOCK), OnCpu()),
        "prefill": half(smollm2(BLOCK), "prefill", PREFILL),
        "decode": half(smollm2(BLOCK), "decode", DECODE),
        "bare": half(smollm2("off").model_copy(update={"drafter": None}), "prefill"),
    }
    described, backend = wanted["whole"]
    backend.launch(described).prepare(folder / "prepared")
    serve = partial(serving_prepared, folder / "prepared")
    ports = {"prefill": PREFILL, "decode": DECODE}
    wanted |= {f"new {role}": half(smollm2(BLOCK), role, port) for role, port in ports.items()}
    with fleet(serve, folder, wanted, ahead=0) as running_servers:
        yield running_servers


@pytest.fixture(scope="module")
def whole(servers: Fleet[Server]) -> Answers:
    """The first server's answers, asked directly, while one of the halves starts."""
    server, _ = servers["whole"].ready.result(), servers["prefill"]
    return Answers.of(server, server.url, PROMPTS, TOKENS)


def test_verify_and_the_doctor_look_through_vllms_router(
    servers: Fleet[Server], whole: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Against the embedded engine without a drafter; the server's acceptance comes from its own metrics."""
    server = servers["whole"].ready.result()
    port, prompts, output = free_port(), tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS[:1]))
    url = f"http://127.0.0.1:{port}"
    serve = [os.environ["EMBEDDED_PYTHON"], "-m", "dflash_serve", "serve", "--target", "smollm2"]
    serve += ["--dtype", "float32", "--port", str(port)]
    with running_router([server.url], tmp_path / "log", package=VLLM) as router:
        with running(serve, tmp_path / "plain", env=dict(os.environ), ready=f"{url}/health", patience=PATIENCE):
            sides = ("--url", router, "--without-url", url, "--metrics-url", server.url)
            code = call(monkeypatch, "verify", *sides, *QUICK, "--prompts", prompts, "--output", output)
        findings = VerifyReport.model_validate_json(output.read_text()).findings
        assert (code, findings.faults, findings.verdict, findings.unit) == (0, {}, "lossless", "token ids")
        told = interview(Endpoint(router, metrics_urls=(server.url,)), CHATS, GREEDY, BLOCK)
        print(f"vLLM's router: verify τ {findings.acceptance_length}, doctor τ {told.observation.acceptance_length}")
        assert (told.width, told.engine) == (BLOCK, "vLLM with dflash-serve")
        assert told.observation.each is not None
        assert all((one.acceptance_length or 0) > 1 for one in told.observation.each)
        assert Answers.of(Server(router, tmp_path), server.url, PROMPTS, TOKENS) == whole
    servers["whole"].left.set()


@pytest.fixture(scope="module")
def halves(servers: Fleet[Server], whole: Answers) -> tuple[Server, Server]:
    """The prefill and the decode half."""
    servers["whole"].left.set()
    prefill, decode = (servers[name] for name in ("prefill", "decode"))
    return prefill.ready.result(), decode.ready.result()


@pytest.fixture(scope="module")
def pair(halves: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's router before both halves, as one server."""
    folder = tmp_path_factory.mktemp("router")
    prefill, decode = halves
    with router_of_a_vllm_pair(prefill.url, decode.url, folder / "log") as url:
        yield Server(url, folder)


def test_a_pair_answers_and_accepts_as_one_server_does(
    halves: tuple[Server, Server], pair: Server, whole: Answers
) -> None:
    """The drafter's K/V of a prompt arrives with the target's, so no draft differs.

    vLLM pads a request's first step on a decode half with drafted tokens that are none, for the shape of its CUDA
    graphs (`pad_spec_decode`, v1/core/sched/scheduler.py), and counts them as one more block, all of it rejected. They
    take draws of a seed, too: a seed gives the same tokens twice, but not those of one server.
    """
    _, decode = halves
    found = Answers.of(pair, decode.url, PROMPTS, TOKENS)
    seeded = [pair.complete(PROMPTS[0], TOKENS, **SEEDED)["token_ids"] for _ in range(2)]
    both = MetricsSource(pair.url, tuple(one.url for one in halves)).require().acceptance
    assert both.acceptance_length == read_acceptance(decode.url).acceptance_length
    loaded = decode.samples.total(LOADED)
    print(f"vLLM pair: acceptance {found.told}; one server {whole.told}; {loaded:.0f} tokens of prompts loaded")
    _is_that_of_one_server(found, whole)
    assert seeded[0] == seeded[1]


def _is_that_of_one_server(found: Answers, whole: Answers) -> None:
    assert found.tokens == whole.tokens
    assert found.counts.accepted == whole.counts.accepted
    assert found.counts.verifications == (whole.counts.verifications or 0) + len(PROMPTS)


def test_a_client_that_hangs_up_frees_both_halves(halves: tuple[Server, Server], pair: Server) -> None:
    asked = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 800, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=asked, timeout=PATIENCE, trust_env=False) as stream:
        lines = stream.iter_lines()  # a name keeps it: without one httpx would close the connection here
        next(lines)
        assert halves[1].runs(1)
    assert all(one.runs(0) for one in halves)


def test_a_decode_half_that_is_killed_ends_its_stream_with_an_error_and_serves_again_when_it_starts_again(
    servers: Fleet[Server], halves: tuple[Server, Server], pair: Server, whole: Answers
) -> None:
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(Endpoint(pair.url).complete, CHATS[0], LONG, {"stream": True})
        assert halves[1].runs(1)
        kill("--port", str(DECODE))
        with pytest.raises(UserError) as refused:
            cut.result()
    print(f"vLLM pair, decode half killed: its stream ends with {refused.value}")
    servers["decode"].left.set()
    _serves_again(pair, servers["new decode"].ready.result(), "decode", whole)


def test_a_prefill_half_that_starts_again_serves_again_and_one_without_the_drafter_is_refused_meanwhile(
    servers: Fleet[Server], pair: Server, whole: Answers, tmp_path: Path
) -> None:
    kill("--port", str(PREFILL))
    servers["prefill"].left.set()
    again, bare = servers["new prefill"].ready, servers["bare"].ready.result()
    decode = servers["new decode"].ready.result()
    router = router_of_a_vllm_pair(bare.url, decode.url, tmp_path / "log")
    with router as url, pytest.raises(urllib.error.HTTPError) as refused:
        Server(url, tmp_path).complete(PROMPTS[0], TOKENS)
    assert refused.value.code == 500
    assert "NIXL compatibility hash mismatch" in Path(decode.folder, "server.log").read_text()
    servers["bare"].left.set()
    again.result()
    _serves_again(pair, decode, "prefill", whole)


def _serves_again(pair: Server, decode: Server, killed: str, whole: Answers) -> None:
    ready = time.monotonic()
    while not _answers(pair):
        assert time.monotonic() < ready + PATIENCE
        time.sleep(1)
    print(f"vLLM pair, {killed} half killed: answers {time.monotonic() - ready:.1f} s after a new one is ready")
    _is_that_of_one_server(Answers.of(pair, decode.url, PROMPTS, TOKENS), whole)


def _answers(pair: Server) -> bool:
    try:
        return bool(pair.complete(PROMPTS[0], 2)["token_ids"])
    except (OSError, KeyError):
        return False

"""Dynamo's real frontend before two real workers: no token changes, no acceptance is lost, no stream of a killed one.

The frontend and the workers meet by files, without etcd and NATS. Two workers of 3 GB each: `make test-distributed`.
EMBEDDED_PYTHON is a Python that has the embedded engine's server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from dflash_serve import LLM, SamplingParams
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.processes import free_port, running
from dflash_serve.common.prometheus import Samples
from dflash_serve.common.store import Store
from dflash_serve.deployment.description import Deployment
from dflash_serve.doctor.evidence import interview
from dflash_serve.models.loader import load_tokenizer
from dflash_serve.speculation.statistics import total
from dflash_serve.verify.questions import VerifyPlan
from dflash_serve.verify.subjects import two_servers
from dflash_serve.verify.verification import Verification
from tests.support.children import gigabytes, kill
from tests.support.dynamo_servers import (
    DynamoWorker,
    dynamo_half,
    running_frontend,
    serving_dynamo,
    wait_for_workers,
)
from tests.support.fleet import fleet
from tests.support.prompts import word_problems
from tests.support.sglang_server import PATIENCE, Server, smollm2

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif("DFLASH_SERVE_TEST_DISTRIBUTED" not in os.environ, reason="make test-distributed"),
]
CHATS = word_problems(4)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
STORY = [{"role": "user", "content": "Tell me a long story about a fox."}]
LONG = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
BRIEFLY = VerifyPlan(
    prompts=2, prompts_sha256="", max_tokens=24, samples=0, penalties=False, long_tokens=48, dtype="float32"
)
MOVED = "dynamo_frontend_model_migration_total"


class Dynamo(NamedTuple):
    """A frontend, and its workers by their system ports."""

    frontend: Endpoint
    workers: list[Server]

    def metric(self, name: str) -> float:
        """A sum of the frontend's own page."""
        return Samples(Server(self.frontend.url, Path()).get("/metrics")).total(name) or 0.0


@contextmanager
def running_dynamo(folder: Path, wanted: Mapping[str, tuple[Deployment, DynamoWorker]]) -> Iterator[Dynamo]:
    """Dynamo before these workers; `folder/store` is where they meet."""
    (folder / "store").mkdir()
    with fleet(serving_dynamo, folder, wanted) as workers, running_frontend(folder / "store", folder) as url:
        servers = [workers[name].ready.result() for name in wanted]
        wait_for_workers(url, len(servers))
        yield Dynamo(Endpoint(url, metrics_urls=tuple(one.url for one in servers)), servers)


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    folder = tmp_path_factory.mktemp("dynamo")
    wanted = {name: (smollm2(8), DynamoWorker(folder / "store", "smollm2")) for name in ("first", "second")}
    with running_dynamo(folder, wanted) as found:
        yield found


def test_dynamo_answers_and_accepts_as_one_engine_does(dynamo: Dynamo) -> None:
    _is_as_one_engine(dynamo, "two workers")


def _is_as_one_engine(dynamo: Dynamo, told: str) -> None:
    before = dynamo.frontend.metrics.require()
    answers = [dynamo.frontend.complete(chat, GREEDY) for chat in CHATS]
    after = dynamo.frontend.metrics.read()
    assert after.engine == "SGLang with dflash-serve", "its page hands on our counters"
    found, memory = after.since(before), gigabytes()
    tokenizer = load_tokenizer("smollm2")
    prompts = [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in CHATS
    ]
    draft = str(dynamo.workers[0].folder / "draft")
    llm = LLM("smollm2", draft, width=8, max_model_len=1024, max_batch_size=1)
    whole = llm.generate(prompts, GREEDY)
    assert [answer.text for answer in answers] == [output.text for output in whole]
    reference = total(output.statistics for output in whole)
    print(f"Dynamo, {told}: {memory:.1f} GB, acceptance {found.acceptance_length}; {reference.acceptance_length}")
    assert found.acceptance_length == pytest.approx(reference.acceptance_length, rel=0.02)
    assert None not in found.survival(), "slots are counted, too"


def test_verify_and_the_doctor_look_through_the_frontend(dynamo: Dynamo, tmp_path: Path) -> None:
    """Against the embedded engine without a drafter; the workers' acceptance comes from their metrics."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = [os.environ["EMBEDDED_PYTHON"], "-m", "dflash_serve", "serve", "--target", "smollm2"]
    serve += ["--dtype", "float32", "--port", str(port)]
    with running(serve, tmp_path / "log", env=dict(os.environ), ready=f"{url}/health", patience=PATIENCE):
        pair = two_servers(dynamo.frontend, Endpoint(url))
        found = Verification(BRIEFLY, CHATS[:2], pair, Store(None, {})).run()
    assert (found.faults, found.verdict, found.unit) == ({}, "lossless", "tokens")
    told = interview(dynamo.frontend, CHATS, GREEDY, 8)
    print(f"Dynamo: verify τ {found.acceptance_length}, doctor τ {told.observation.acceptance_length}")
    assert told.engine == "SGLang with dflash-serve"
    assert told.observation.each is not None
    assert all((one.acceptance_length or 0) > 1 for one in told.observation.each)


def test_streams_of_a_killed_worker_go_on_at_the_other_one(dynamo: Dynamo) -> None:
    undisturbed = dynamo.frontend.complete(STORY, LONG).text
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(dynamo.frontend.complete, STORY, LONG, {"stream": True}) for _ in range(4)]
        victim = _busy(dynamo.workers)
        killed = time.monotonic()
        kill("--speculative-draft-model-path", str(victim.folder / "draft"))
        answers = [one.result() for one in asked]
    print(f"Dynamo, a worker killed: four streams whole {time.monotonic() - killed:.1f} s later")
    assert [(one.text, one.finish_reason) for one in answers] == [(undisturbed, "length")] * len(answers)
    assert dynamo.metric(MOVED) > 0


def _busy(workers: list[Server]) -> Server:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for worker in workers:
            if worker.metric("sglang:num_running_reqs"):
                return worker
    raise AssertionError("no worker has a stream")


def test_a_pair_behind_dynamo_answers_and_accepts_as_one_engine_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its frontend asks the prefill half and hands the prompt on to the decode half."""
    folder, meeting = tmp_path_factory.mktemp("pair"), free_port()
    wanted = {role: dynamo_half(smollm2(8), role, meeting, folder / "store") for role in ("prefill", "decode")}
    with running_dynamo(folder, wanted) as pair:
        _is_as_one_engine(pair, "a pair")
        prefill, decode = pair.workers
        assert prefill.metric("sglang:prompt_tokens_total") > 0
        assert decode.metric("sglang:generation_tokens_total") > 0

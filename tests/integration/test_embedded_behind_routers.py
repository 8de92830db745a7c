"""The embedded engine behind the real routers, which add fields to requests and read pages of their workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from dflash_serve.client.metrics import read_server
from dflash_serve.verify.report import VerifyReport
from tests.support.command_line import call
from tests.support.copying import write_copying_pair
from tests.support.embedded import tiny_engine
from tests.support.inference_gateway import running_gateway
from tests.support.serving import MODEL, running
from tests.support.sglang_router import SGLANG, SMG, VLLM, running_router

BLOCK, USERS = 4, 8
TEXTS = ("where is the fox", "who sees the moon", "how cold is the snow", "why does it rain")
OWN_PAGE = (SGLANG, SMG)
"""Routers with a page of their workers' metrics."""
GATEWAY = "gateway"
"""The real Envoy, with an endpoint picker."""


@dataclass(frozen=True)
class Place:
    """A router before two servers that draft, and a server that does not."""

    folder: Path
    package: str
    router: str
    workers: tuple[str, str]
    plain: str

    @property
    def metrics(self) -> tuple[str, ...]:
        """The option that names the workers' metrics, where the router does not show them."""
        own = tuple(word for one in self.workers for word in ("--metrics-url", one))
        return () if self.package in OWN_PAGE else own


ROUTERS = [SGLANG, *(pytest.param(one, marks=pytest.mark.thorough) for one in (SMG, VLLM, GATEWAY))]


@pytest.fixture(scope="module", params=ROUTERS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    pair = write_copying_pair(folder / "pair", positions=512, block_size=BLOCK)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    (folder / "deployment.yaml").write_text(
        f"target: {{model: {pair[0]}}}\ndrafter: {{model: {pair[1]}}}\nhardware: {{dtype: float32}}\n"
        f"limits: {{max_batch_size: {USERS}}}\n"
    )
    with ExitStack() as stack:
        engines = [tiny_engine(pair, width=width, max_batch_size=USERS) for width in (BLOCK, BLOCK, 1)]
        first, second, plain = (stack.enter_context(running(engine, queue=64)).url for engine in engines)
        if request.param == GATEWAY:
            router = running_gateway([first, second], folder)
        else:
            router = running_router([first, second], folder / "log", package=request.param)
        yield Place(folder, request.param, stack.enter_context(router), (first, second), plain)


def asked(url: str, **fields: Any) -> list[str | None]:
    """A chat, a streamed one and a completion of a server's only model."""
    with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        (model,) = [one.id for one in client.models.list()]
        assert model == MODEL
        given: dict[str, Any] = {"model": model, "max_tokens": 24, "temperature": 0, **fields}
        chat = {**given, "messages": [{"role": "user", "content": TEXTS[0]}]}
        whole = client.chat.completions.create(**chat).choices[0].message.content
        chunks = client.chat.completions.create(**chat, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return [whole, streamed, client.completions.create(**given, prompt=TEXTS[1]).choices[0].text]


def test_answers_through_the_router_are_the_servers_own(place: Place) -> None:
    assert asked(place.router) == asked(place.plain)


def test_the_router_joins_the_metrics_of_its_workers_though_one_was_never_asked(place: Place) -> None:
    if place.package not in OWN_PAGE:
        pytest.skip("it has no page of all workers")
    seen = read_server(place.router)
    assert set(seen.workers or {}) == set(place.workers)
    assert seen.engine == "dflash-serve"


@pytest.mark.thorough
@pytest.mark.parametrize("place", [GATEWAY], indirect=True)
def test_a_page_that_the_gateway_takes_of_any_server_is_not_taken_for_all_of_them(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_server(place.router).engine is None
    assert call(monkeypatch, "top", "--url", place.router, "--once") == 2
    told = capsys.readouterr().err
    assert "it is a gateway that picks one of its servers for each request" in told
    assert "give --metrics-url for each of its servers" in told
    assert call(monkeypatch, "top", "--url", place.router, *place.metrics, "--once", "--interval", 0.1, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["workers"]) == set(place.workers)


def test_verify_passes_through_the_router(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    report = place.folder / "verify.json"
    sides = ("--url", place.router, "--without-url", place.plain, *place.metrics)
    sizes = ("--samples", 0, "--max-tokens", 24, "--long-tokens", 64, "--concurrency", USERS)
    given = (*sizes, "--prompts", place.folder / "prompts.jsonl", "--output", report)
    assert call(monkeypatch, "verify", *sides, *given) == 0
    found = VerifyReport.model_validate_json(report.read_text()).findings
    assert found.verdict == "lossless"
    assert (found.acceptance_length or 0) > 1.5


@pytest.mark.thorough
def test_the_doctor_finds_the_servers_healthy_through_the_router(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = place.folder / "doctor.json"
    given = ("--prompts", place.folder / "prompts.jsonl", "--max-tokens", 32, "--output", report)
    code = call(monkeypatch, "doctor", place.folder / "deployment.yaml", "--url", place.router, *place.metrics, *given)
    assert code == 0, capsys.readouterr()
    assert json.loads(report.read_text())["verdict"] == "healthy"


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("aiperf") is None, reason="pip install 'dflash-serve[bench]'")
@pytest.mark.parametrize("place", [SGLANG], indirect=True)  # four minutes; the others were run by hand
def test_certify_gives_a_verdict_on_servers_behind_the_router(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It verifies them, and benches them by aiperf."""
    sides = ("--url", place.router, "--without-url", place.plain, *place.metrics)
    sizes = ("--concurrency", "1,2", "--max-tokens", 24, "--minutes", 5, "--dataset", place.folder / "prompts.jsonl")
    output = place.folder / "certificate"
    code = call(monkeypatch, "certify", place.folder / "deployment.yaml", *sides, *sizes, "--output", output)
    report = json.loads((output / "certificate.json").read_text())
    assert code in (0, 1), report  # a router before tiny models costs more than a drafter gains
    assert report["lines"][0].startswith("lossless")

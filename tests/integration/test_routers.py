"""Our verbs behind real routers and behind Dynamo's frontend, with workers whose acceptance is known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import read_server
from dflash_serve.common.http import RefusedError
from dflash_serve.common.processes import free_port
from dflash_serve.doctor.evidence import interview
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.report import VerifyReport
from tests.support.command_line import call
from tests.support.fake_dynamo import FakeDynamo
from tests.support.fake_sglang import BLOCK, FakeSglang
from tests.support.sglang_router import SGLANG, SMG, VLLM, running_router

TEXTS = ("where is the fox", "who sees the moon", "how cold is the snow", "why does it rain")
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
QUICK = ("--samples", 0, "--max-tokens", 24, "--long-tokens", 32, "--concurrency", 4)


@pytest.fixture
def plain() -> Iterator[tuple[FakeSglang, str]]:
    """A server without speculation, asked directly."""
    server = FakeSglang(drafts=False)
    with server.listening() as url:
        yield server, url


@pytest.fixture(scope="module")
def workers() -> list[FakeSglang]:
    """The workers behind the router."""
    return [FakeSglang(drafts=True), FakeSglang(drafts=True)]


@pytest.fixture(scope="module")
def addresses(workers: Sequence[FakeSglang]) -> Iterator[list[str]]:
    first, second = (one.listening() for one in workers)
    with first as a, second as b:
        yield [a, b]


@pytest.fixture(scope="module", params=[SGLANG, pytest.param(SMG, marks=pytest.mark.thorough)])
def router(
    request: pytest.FixtureRequest, addresses: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A router with a page of its workers' metrics."""
    log = tmp_path_factory.mktemp("router") / "log"
    with running_router(addresses, log, package=request.param) as url:
        yield url


@pytest.fixture(scope="module")
def vllms(addresses: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's router, whose /metrics is that of one worker."""
    with running_router(addresses, tmp_path_factory.mktemp("router") / "log", package=VLLM) as url:
        yield url


def verify(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> tuple[int, VerifyReport]:
    """The exit code and the report of `verify` over `TEXTS`, as chats."""
    prompts, report = folder / "prompts.jsonl", folder / "report.json"
    prompts.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    code = call(monkeypatch, "verify", *arguments, *QUICK, "--prompts", prompts, "--output", report)
    return code, VerifyReport.model_validate_json(report.read_text())


@pytest.mark.thorough
def test_behind_vllms_router_verify_and_the_doctor_take_the_workers_metrics(
    vllms: str,
    addresses: Sequence[str],
    plain: tuple[FakeSglang, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    own = [word for url in addresses for word in ("--metrics-url", url)]
    code, report = verify(monkeypatch, tmp_path, "--url", vllms, "--without-url", plain[1], *own)
    assert (code, report.findings.verdict, report.findings.unit) == (0, "lossless", "token ids")
    assert report.findings.acceptance_length == pytest.approx(2, abs=0.1)
    told = interview(Endpoint(vllms, metrics_urls=tuple(addresses)), CHATS, GREEDY, BLOCK)
    assert told.observation.each is not None
    assert [(one.verifications, one.accepted) for one in told.observation.each] == [(10, 9)] * len(CHATS)


@pytest.mark.thorough
def test_one_workers_page_is_not_taken_for_all_of_vllms_router(vllms: str, addresses: Sequence[str]) -> None:
    assert read_server(vllms).engine is None
    with pytest.raises(UserError, match="it does not show the metrics of all its 2 workers") as refused:
        interview(Endpoint(vllms), CHATS, GREEDY, BLOCK)
    assert all(f"--metrics-url {url}" in str(refused.value) for url in addresses)


def test_verify_compares_tokens_where_the_router_drops_their_ids_and_says_so(
    router: str, plain: tuple[FakeSglang, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, report = verify(monkeypatch, tmp_path, "--url", router, "--without-url", plain[1])
    assert (code, report.findings.verdict, report.findings.unit) == (0, "lossless", "tokens")
    assert "not tested: " in report.findings.headline
    assert "token ids (with speculation, answers have tokens alone)" in report.findings.headline
    assert {"long answers", "streamed"} <= {one.case for one in report.findings.exact if one.identical == one.prompts}
    assert report.findings.acceptance_length == pytest.approx(2, abs=0.1)


def test_verify_finds_a_worker_behind_the_router_that_is_wrong(
    router: str,
    workers: list[FakeSglang],
    plain: tuple[FakeSglang, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(workers[1], "wrong", True)
    code, report = verify(monkeypatch, tmp_path, "--url", router, "--without-url", plain[1])
    assert code == 1
    assert all("position 5" in where for where in report.findings.faults.values())  # of which kind, the router decides


def test_the_doctor_reads_every_prompts_counts_through_the_router(router: str) -> None:
    told = interview(Endpoint(router), CHATS, GREEDY, BLOCK)
    assert told.observation.each is not None
    counts = [(one.verifications, one.accepted, one.widths) for one in told.observation.each]
    assert counts == [(10, 9, {BLOCK: 10})] * len(CHATS)
    assert (told.width, told.engine) == (BLOCK, "SGLang with dflash-serve")


def test_the_doctor_names_the_worker_that_accepts_less(
    router: str, workers: list[FakeSglang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router hands requests out in turn; one worker accepts every third draft, the other every second token's."""
    monkeypatch.setattr(workers[1], "rejects", True)
    told = interview(Endpoint(router), [*CHATS, *CHATS, *CHATS], GREEDY, BLOCK)
    (note,) = [note for note in told.notes if "is behind its peers" in note]
    assert " is behind its peers: τ 1." in note
    assert told.observation.each is not None
    assert len(told.observation.each) == 12


def test_top_sums_the_workers_behind_the_router(
    router: str, workers: list[FakeSglang], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "time.sleep", lambda _: [one.answer("/v1/completions", {"prompt": "x", "max_tokens": 21}) for one in workers]
    )
    assert call(monkeypatch, "top", "--url", router, "--once", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["acceptance_length"] == 2
    assert shown["tokens_per_second"] * shown["seconds"] == pytest.approx(42)
    assert (shown["engine"], shown["running"]) == ("SGLang with dflash-serve", 0)
    assert [one["acceptance_length"] for one in shown["workers"].values()] == [2, 2]
    assert shown["behind"] == []


def test_a_stream_that_is_cut_behind_the_router_is_asked_for_again(router: str, workers: list[FakeSglang]) -> None:
    whole = Endpoint(router).complete(CHATS[0], GREEDY)
    for worker in workers:
        worker.cuts = 1
    streamed = Endpoint(router).complete(CHATS[0], GREEDY, {"stream": True})
    assert (streamed.text, streamed.finish_reason) == (whole.text, "length")
    assert [worker.cuts for worker in workers] == [0, 0]


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("aiperf") is None, reason="pip install 'dflash-serve[bench]'")
def test_bench_names_streams_that_end_early(
    plain: tuple[FakeSglang, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SGLang's router ends them when a worker dies; aiperf counts them as answered."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    plain[0].cuts = 2
    given = ("--dataset", tmp_path / "prompts.jsonl", "--concurrency", 1, "--rounds", 1, "--min-requests", 6)
    more = ("--max-tokens", 20, "--no-warm-up", "--tokenizer", "smollm2", "--output", tmp_path / "out")
    assert call(monkeypatch, "bench", "--url", f"plain={plain[1]}", *given, *more) == 0
    assert "2 streams ended early, without a reason" in capsys.readouterr().out


def test_behind_dynamo_verify_and_the_doctor_take_the_workers_metrics(
    plain: tuple[FakeSglang, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with FakeDynamo(FakeSglang(drafts=True)).listening() as (frontend, system):
        sides = ("--url", frontend, "--without-url", plain[1])
        code, report = verify(monkeypatch, tmp_path, *sides, "--metrics-url", f"{system}/metrics")
        told = interview(Endpoint(frontend, metrics_urls=(system,)), CHATS, GREEDY, BLOCK)
    assert (code, report.findings.unit) == (0, "tokens")
    assert "token ids (with speculation, answers have tokens alone)" in report.findings.headline
    assert (told.observation.acceptance_length, told.engine) == (1.9, "SGLang")


def test_an_error_event_of_dynamo_is_an_error_and_no_answer() -> None:
    dynamo = FakeDynamo(FakeSglang(drafts=True))
    with dynamo.listening() as (frontend, _):
        endpoint = Endpoint(frontend)
        assert endpoint.complete(CHATS[0], GREEDY, {"stream": True}).unit == "tokens"
        dynamo.failures = 1
        with pytest.raises(RefusedError, match="500: Stream ended before generation"):
            endpoint.complete(CHATS[0], GREEDY, {"stream": True})


@pytest.mark.parametrize("verb", ["verify", "top"])
def test_missing_metrics_are_told_with_the_option_before_any_question(
    verb: str,
    plain: tuple[FakeSglang, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    dynamo, report = FakeDynamo(FakeSglang(drafts=True)), tmp_path / "report.json"
    with dynamo.listening() as (frontend, _):
        given: dict[str, Sequence[object]] = {
            "verify": ("--url", frontend, "--without-url", plain[1], "--output", report),
            "top": ("--url", frontend, "--once"),
        }
        assert call(monkeypatch, verb, *given[verb]) == 2
        said = "".join(capsys.readouterr())
    assert f"{frontend}: it shows no metrics of an engine that is known here" in said
    assert "--metrics-url" in said
    assert (dynamo.worker.asked, plain[0].asked, report.exists()) == ([], [], False)


def test_the_doctor_says_where_to_look_if_a_server_of_several_ranks_hangs_at_its_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for ranks, told in ((2, True), (1, False)):
        devices = {"parallel": {"tensor": ranks}, "hardware": {"gpu": "b200", "count": ranks}}
        pair = {"target": {"model": "smollm2"}, "drafter": {"model": "smollm2"}}
        (tmp_path / "deployment.json").write_text(json.dumps({**pair, **devices}))
        report = tmp_path / "report.json"
        assert call(monkeypatch, "doctor", tmp_path / "deployment.json", "--url", url, "--output", report) == 2
        said = " ".join("".join(capsys.readouterr()).split())
        assert f"{url}/metrics: no answer" in said
        assert ("if its start hangs, find the rank that the others wait for" in said) == told

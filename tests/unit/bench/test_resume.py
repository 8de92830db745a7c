"""Interrupted anywhere, a bench keeps what is finished, says so, and goes on with the rest only."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_serve.bench.aiperf import Aiperf, Job
from dflash_serve.cli.main import app
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics
from tests.support.bench_sites import counting_server, instant
from tests.support.site import site


@pytest.fixture
def url() -> Iterator[str]:
    with counting_server() as found:
        yield found


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Runs that were measured; aiperf answers at once."""
    seen: list[Job] = []
    monkeypatch.setattr("dflash_serve.bench.runner.find_aiperf", lambda: ["aiperf"])
    monkeypatch.setattr(Aiperf, "run", instant(lambda job: 100 / job.concurrency, seen))
    return seen


def bench(url: str, tmp_path: Path, *more: str) -> Any:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    both = ["--url", f"off={url}", "--url", f"fast={url}/v1"]
    small = ["--dataset", str(prompts), "--concurrency", "1,2", "--rounds", "2", "--output", str(tmp_path / "out")]
    return CliRunner().invoke(app, ["bench", *both, *small, *more])


def kept(tmp_path: Path) -> int:
    lines = [json.loads(line) for path in (tmp_path / "out/runs").glob("*.jsonl") for line in path.open()]
    return sum("value" in line for line in lines)


def test_behind_a_router_acceptance_is_that_of_each_worker_and_of_all_together(
    url: str, tmp_path: Path, jobs: list[Job]
) -> None:
    with site(lambda path, *_: (200, {"data": [{"id": "m"}]}) if path == "/v1/models" else (404, "")) as router:
        with counting_server() as second:
            (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
            asked = ["bench", "--url", f"far={router}", "--dataset", str(tmp_path / "p.jsonl"), "--rounds", "2"]
            asked += ["--concurrency", "1", "--output", str(tmp_path / "out")]
            asked += ["--metrics-url", f"far={url}", "--metrics-url", f"far={second}/metrics"]
            result = CliRunner().invoke(app, asked)
        assert result.exit_code == 0, result.output
        assert f"τ by worker: {url} 1.90, {second} 1.90" in result.output
        (point,) = json.loads((tmp_path / "out/bench.json").read_text())["points"]
        assert point["acceptance"]["verifications"] == 400, "two rounds of 100 steps on two workers"
        assert {name: one["verifications"] for name, one in point["workers"].items()} == {url: 200, second: 200}
        assert point["workers"][url]["acceptance_length"] == pytest.approx(1.9)
        assert second in (tmp_path / "out/report.html").read_text()


def test_a_server_without_metrics_has_the_acceptance_of_its_answers(
    tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = AcceptanceStatistics.of_usage(48, 30, 15, 2)
    run = Aiperf.run
    monkeypatch.setattr(Aiperf, "run", lambda self, job: run(self, job).model_copy(update={"told": told}))
    with site(lambda path, *_: (200, {"data": [{"id": "m"}]}) if path == "/v1/models" else (404, "")) as router:
        result = bench(router, tmp_path)
    assert result.exit_code == 0, result.output
    assert "τ 2.88" in result.output  # 1 + 30 / (48 - 2 - 30)
    point = json.loads((tmp_path / "out/bench.json").read_text())["points"][0]["acceptance"]
    assert (point["verifications"], point["drafted"]) == (32, 90), "of two rounds"


def test_all_runs_and_a_report(url: str, tmp_path: Path, jobs: list[Job]) -> None:
    result = bench(url, tmp_path)
    assert result.exit_code == 0, result.output
    assert (len(jobs), kept(tmp_path)) == (8, 8)
    assert "[8/8]" in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"bench.json", "report.html"}
    assert not list((tmp_path / "out").rglob(".*"))
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    point = report["points"][0]["acceptance"]
    assert (point["verifications"], point["acceptance_length"], point["survival"]) == (200, 1.9, [0.6, 0.3])


FAILED = UserError("no request was answered", where="aiperf")


@pytest.mark.parametrize(("after", "error"), [(0, KeyboardInterrupt()), (5, KeyboardInterrupt()), (3, FAILED)])
def test_what_is_interrupted_or_fails_goes_on_with_what_is_missing(
    url: str, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException
) -> None:
    going = Aiperf.run

    def stop(self: Aiperf, job: Job) -> Any:
        if len(jobs) == after and not job.folder.name.endswith("warm-up"):
            raise error
        return going(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(Aiperf, "run", stop)
        result = bench(url, tmp_path)
    assert result.exception is error if error is FAILED else result.exit_code == 130
    assert "the same command goes on with the rest" in result.output
    assert kept(tmp_path) == after
    if after:
        assert f"Incomplete: {after} of 8 runs" in (tmp_path / "out" / "report.html").read_text()
    finished = {job.folder.name for job in jobs}
    jobs.clear()
    assert bench(url, tmp_path).exit_code == 0
    assert len(jobs) == 8 - after
    assert not finished & {job.folder.name for job in jobs}
    assert "Incomplete" not in (tmp_path / "out" / "report.html").read_text()


def test_a_finished_bench_is_reported_anew_without_aiperf_or_servers(
    url: str, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench(url, tmp_path).exit_code == 0
    jobs.clear()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    result = bench(url, tmp_path, "--interactivity", "50")
    assert (result.exit_code, jobs) == (0, [])
    assert " At 50.0 tokens/s/user, “fast” serves" in result.output


def test_more_rounds_and_concurrencies_can_be_added(url: str, tmp_path: Path, jobs: list[Job]) -> None:
    bench(url, tmp_path)
    jobs.clear()
    assert bench(url, tmp_path, "--rounds", "3", "--concurrency", "1,2,4").exit_code == 0
    assert len(jobs) == 2 * 3 * 3 - 8


def test_other_settings_are_measured_anew_beside_the_old_runs(url: str, tmp_path: Path, jobs: list[Job]) -> None:
    assert "anew" not in bench(url, tmp_path).output
    result = bench(url, tmp_path, "--max-tokens", "32")
    why = "made with other settings (request.output_tokens: 128 there, 32 here); measured anew"
    assert f"off: its runs were {why}" in result.output
    assert (kept(tmp_path), json.loads((tmp_path / "out/bench.json").read_text())["runs"]["done"]) == (16, 8)
    jobs.clear()
    assert bench(url, tmp_path).exit_code == 0  # the old runs are still there, and no others are shown
    assert jobs == []


def test_a_bench_that_measured_nothing_does_not_bind_the_next(url: str, tmp_path: Path, jobs: list[Job]) -> None:
    """A mistyped address is corrected, and the command repeated."""
    wrong = bench("http://127.0.0.1:9", tmp_path)
    assert "no answer" in str(wrong.exception)
    assert bench(url, tmp_path, "--max-tokens", "32").exit_code == 0
    assert kept(tmp_path) == 8


def test_a_broken_run_file_is_named(url: str, tmp_path: Path, jobs: list[Job]) -> None:
    bench(url, tmp_path)
    (tmp_path / "out" / "runs" / "off.jsonl").write_text("nonsense\n")
    assert "off.jsonl: not a file of kept results; remove it" in str(bench(url, tmp_path).exception)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--concurrency", "1,x"], "no list of numbers of users"),
        (["--baseline", "slow"], "there is no variant 'slow'; use one of: off, fast"),
        (["--url", "off=http://b"], "two variants are called"),
        (["--dataset", "synthetic"], "made-up prompts mislead"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(url: str, tmp_path: Path, more: list[str], why: str) -> None:
    result = bench(url, tmp_path, *more)
    assert why in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_nothing_to_measure() -> None:
    assert "nothing to measure" in str(CliRunner().invoke(app, ["bench"]).exception)


def test_sigterm_stops_it_like_ctrl_c_and_takes_aiperf_along(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    for module in ("runner", "aiperf"):
        monkeypatch.setattr(f"dflash_serve.bench.{module}.find_aiperf", lambda: [sys.executable, "-c", program])
    threading.Thread(target=_kill_when, args=(note,), daemon=True).start()
    assert bench(url, tmp_path).exit_code == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def _kill_when(note: Path) -> None:
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)

"""Servers that a bench starts come up, are told apart from those that fail, and never outlive it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from dflash_serve.backend import Command, Metrics
from dflash_serve.deployment import Deployment, Model
from dflash_serve.errors import Problem, UserError
from dflash_serve.proving.bench.aiperf import Aiperf, Job
from dflash_serve.proving.bench.plan import Sweep, Workload
from dflash_serve.proving.bench.results import Figures
from dflash_serve.proving.bench.servers import model_of, served
from dflash_serve.proving.bench.sweep import Sweeper
from dflash_serve.proving.bench.ways import Way

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        loading = self.path == "/ready" and Handler.asked < 5
        self.send_response(503 if loading else 404 if self.path == "/metrics" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": sys.argv[2]}]}).encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN = "print('loading'); print('dflash-serve: the GPU has no memory left'); raise SystemExit(2)"


class Fake:
    """A backend whose server lists one model."""

    name = "fake"
    metrics = Metrics("/metrics", "prometheus", None, None, None)

    def __init__(self, program: str = SERVER) -> None:
        self.program, self.prepared = program, 0

    def check(self, deployment: Deployment) -> list[Problem]:
        return []

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        self.prepared += 1
        (folder / "deployment.json").write_text(deployment.model_dump_json())

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        assert (folder / "deployment.json").exists()
        return Command((sys.executable, "-c", self.program, str(port), deployment.target.model))


def way(name: str) -> Way:
    return Way(name, deployment=Deployment(target=Model(model=name)))


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/v1/models", timeout=5):
            return True
    except URLError:
        return False


def test_a_server_is_there_when_it_is_ready_and_gone_afterwards(tmp_path: Path) -> None:
    with served(way("a"), Fake(), tmp_path / "a.log") as url:
        assert model_of(url) == "a"
    assert not answers(url)


def test_a_server_that_runs_already_is_left_alone(tmp_path: Path) -> None:
    with served(way("a"), Fake(), tmp_path / "a.log") as url:
        with served(Way("mine", url=url), None, tmp_path / "b.log") as same:
            assert same == url
        assert answers(url)


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"way 'a': its server ended \(dflash-serve: the GPU has no memory left\)"),
        served(way("a"), Fake(BROKEN), tmp_path / "a.log"),
    ):
        pass


def test_a_command_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    class Missing(Fake):
        def command(self, *_: object, **__: object) -> Command:
            return Command(("/no/such/engine",))

    with (
        pytest.raises(UserError, match=r"/no/such/engine: cannot be started .*install what --backend fake needs"),
        served(way("a"), Missing(), tmp_path / "a.log"),
    ):
        pass


@pytest.mark.parametrize("in_turn", [False, True])
def test_in_turn_there_is_never_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: bool) -> None:
    seen: dict[str, str] = {}
    most = 0

    def run(_: Aiperf, job: Job) -> Figures:
        nonlocal most
        seen[job.model] = job.url
        most = max(most, sum(answers(url) for url in seen.values()))
        unknown: Any = dict.fromkeys(("first_token_ms", "first_token_p99_ms", "inter_token_ms"))
        return Figures(
            requests=1, errors=0, output_tokens=1.0, seconds=1.0, throughput=1.0, interactivity=1.0, **unknown
        )

    monkeypatch.setattr(Aiperf, "run", run)
    workload = Workload(dataset="p", prompts_sha256=None, output_tokens=4, ignore_eos=False, temperature=0.0)
    backend, sweep = Fake(), Sweep(concurrencies=(1, 2), rounds=2, requests_per_user=1, min_requests=1)
    sweeper = Sweeper(
        Aiperf([], workload, None),
        [way("a"), way("b")],
        sweep,
        backend,
        tmp_path,
        in_turn=in_turn,
        tell=lambda *_: None,
    )
    (tmp_path / "work").mkdir()
    sweeper.run()
    assert most == (1 if in_turn else 2)
    assert backend.prepared == (3 if in_turn else 2)  # in turn: a, b, and a again; the second round begins with b
    assert not any(answers(url) for url in seen.values())
    assert len(sweeper.folder.runs()) == 8

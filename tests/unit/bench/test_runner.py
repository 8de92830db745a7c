"""A bench starts its servers, side by side or one at a time, and none outlives it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.protocol import Command, Launch, PreparedFile
from dflash_serve.bench.aiperf import Aiperf, Figures, Job
from dflash_serve.bench.runner import Bench
from dflash_serve.common.http import page_status
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem, UserError
from dflash_torch.facts import FACTS
from tests.support.bench_sites import settings

SERVER = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        loading = self.path == "/ready" and Handler.asked < 5
        self.send_response(503 if loading else 404 if self.path == "/metrics" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": sys.argv[2] + os.environ.get("SEEN", "")}]}).encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN = "print('loading'); print('dflash-serve: the GPU has no memory left'); raise SystemExit(2)"


class Fake:
    """A backend whose server lists one model."""

    name, facts = "fake", FACTS

    def __init__(self, program: str = SERVER) -> None:
        self.program, self.prepared = program, 0

    def launch(self, deployment: Deployment) -> FakeLaunch:
        return FakeLaunch(backend=self, deployment=deployment)


@dataclass(frozen=True, kw_only=True)
class FakeLaunch(Launch):
    """Starts the backend's program."""

    backend: Fake

    @property
    def problems(self) -> list[Problem]:
        return []

    def files(self, folder: Path) -> Sequence[PreparedFile]:
        return ()

    def prepare(self, folder: Path) -> None:
        self.backend.prepared += 1
        (folder / "deployment.json").write_text(self.deployment.model_dump_json())

    def command(self, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        width = str(self.deployment.speculation.width)
        return Command((sys.executable, "-c", self.backend.program, str(port), width))


class Looking(Fake):
    """One that looks at the machine."""

    looked = 0

    def look(self) -> dict[str, str]:
        self.looked += 1
        return {"SEEN": f", look {self.looked}"}


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """Settings of two variants of one deployment."""
    prompts, deployment = tmp_path / "p.jsonl", tmp_path / "deployment.yaml"
    prompts.write_text('{"prompt": "hello"}\n')
    deployment.write_text("target: {model: t}\ndrafter: {model: d}\n")
    files = {"deployment": deployment, "dataset": str(prompts), "output": tmp_path / "out", "backend": "fake"}
    return {**files, "variants": "2,3", "rounds": 2, "requests_per_user": 1, "min_requests": 1, "warm_up": False}


def answers(url: str) -> bool:
    return page_status(f"{url}/v1/models", timeout=5) is not None


def quiet(*_: object) -> None: ...


UNKNOWN: Any = dict.fromkeys(("first_token_ms", "first_token_p99_ms", "inter_token_ms"))
FIGURES = Figures(requests=1, errors=0, output_tokens=1.0, seconds=1.0, throughput=1.0, interactivity=1.0, **UNKNOWN)


class Absent(Fake):
    """One whose engine is not installed."""

    def launch(self, deployment: Deployment) -> FakeLaunch:
        launch = super().launch(deployment)
        object.__setattr__(launch, "command", lambda *_, **__: Command(("no-such-engine",)))
        return launch


def test_an_engine_that_is_not_installed_leaves_no_folders_behind(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_serve.bench.settings.server_backend", lambda _: Absent())
    monkeypatch.setattr("dflash_serve.bench.runner.find_aiperf", lambda: ["aiperf"])
    with pytest.raises(UserError, match="no-such-engine: not installed"):
        Bench(settings(**small)).run(quiet)
    assert not small["output"].exists()


@pytest.mark.parametrize("in_turn", [False, True])
def test_in_turn_there_is_never_more_than_one(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    backend = Fake()
    monkeypatch.setattr("dflash_serve.bench.settings.server_backend", lambda _: backend)
    monkeypatch.setattr("dflash_serve.bench.runner.find_aiperf", lambda: ["aiperf"])
    seen: dict[str, str] = {}
    most = 0

    def run(_: Aiperf, job: Job) -> Figures:
        nonlocal most
        seen[job.model] = job.url
        most = max(most, sum(answers(url) for url in seen.values()))
        return FIGURES

    monkeypatch.setattr(Aiperf, "run", run)
    bench = Bench(settings(**small, in_turn=in_turn))
    bench.run(quiet)
    assert seen.keys() == {"2", "3"}  # each run asks the model that its own server lists
    assert most == (1 if in_turn else 2)
    assert backend.prepared == (3 if in_turn else 2)  # in turn: 2, 3, and 2 again; the second round begins with 3
    assert not any(answers(url) for url in seen.values())
    assert len(bench.finished()) == 8


def test_servers_that_are_compared_have_seen_the_machine_at_the_same_moment(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_serve.bench.settings.server_backend", lambda _: Looking())
    monkeypatch.setattr("dflash_serve.bench.runner.find_aiperf", lambda: ["aiperf"])
    seen: list[str] = []

    def run(_: Aiperf, job: Job) -> Figures:
        seen.append(job.model)
        return FIGURES

    monkeypatch.setattr(Aiperf, "run", run)
    Bench(settings(**small)).run(quiet)
    assert set(seen) == {"2, look 1", "3, look 1"}


def test_a_server_that_ends_is_quoted_with_the_log_that_names_its_variant(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_serve.bench.settings.server_backend", lambda _: Fake(BROKEN))
    monkeypatch.setattr("dflash_serve.bench.runner.find_aiperf", lambda: ["aiperf"])
    said = r"fixed-2\.server/server\.log: the server ended with exit code 2: .*the GPU has no memory left"
    with pytest.raises(UserError, match=said):
        Bench(settings(**small)).run(quiet)

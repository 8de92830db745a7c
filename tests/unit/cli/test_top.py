"""`top` on a real server: live figures from its metrics, for people and for scripts."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from dflash_serve.cli.top import _curve
from dflash_serve.client.metrics import LiveFigures, ServerReading, read_server
from dflash_serve.speculation.statistics import AcceptanceStatistics
from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, Running, running
from tests.support.tiny_target import write_tiny_pair

LONG: dict[str, Any] = {"model": MODEL, "prompt": [9, 8, 7], "max_tokens": 240, "temperature": 0, "ignore_eos": True}
runner = CliRunner()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_engine(write_tiny_pair(tmp_path_factory.mktemp("pair")), width=4)) as server:
        yield server


@pytest.fixture
def busy(server: Running) -> Iterator[str]:
    """The server's address, while one user asks without a pause."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)

    user = threading.Thread(target=ask)
    user.start()
    yield server.url
    over.set()
    user.join(60)


def test_a_script_gets_one_object_of_figures(busy: str) -> None:
    result = runner.invoke(app, ["top", busy, "--once", "--json", "--interval", "1"])
    assert result.exit_code == 0, result.output
    (line,) = result.output.splitlines()
    figures = json.loads(line)
    assert figures["engine"] == "dflash-serve"
    assert figures["tokens_per_second"] > 0
    assert 1 <= figures["acceptance_length"] <= 4
    assert len(figures["survival"]) == 3
    assert sum(figures["widths"].values()) == pytest.approx(1)
    assert figures["queued"] == 0
    assert figures["running"] in (0, 1)


def test_people_get_a_page(busy: str) -> None:
    result = runner.invoke(app, ["top", busy, "--once", "--interval", "0.5"])
    assert result.exit_code == 0, result.output
    for word in ("tokens/s", "users", "in the queue", "K/V cache", "acceptance τ", "slot 3", "% of steps"):
        assert word in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_server_that_does_nothing_says_unknown_and_not_nought(server: Running) -> None:
    result = runner.invoke(app, ["top", server.url, "--once", "--json", "--interval", "0.1"])
    figures = json.loads(result.output)
    assert (figures["acceptance_length"], figures["widths"], figures["tokens_per_second"]) == (None, None, 0)


def test_what_is_no_server_or_shows_no_metrics_is_one_line(tmp_path: Path) -> None:
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    site = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: SimpleHTTPRequestHandler(*given, directory=tmp_path))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{site.server_address[1]}"
        assert "shows no metrics of an engine" in str(runner.invoke(app, ["top", url, "--once"]).exception)
    finally:
        site.shutdown()
        site.server_close()
    assert "no answer" in str(runner.invoke(app, ["top", "http://127.0.0.1:9", "--once"]).exception)


def test_figures_are_of_the_time_between_two_readings(server: Running) -> None:
    before = read_server(server.url)
    httpx.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 30}, timeout=60)
    now = read_server(server.url)
    found = LiveFigures.between(before, now)
    assert found.tokens_per_second == pytest.approx(30 / (now.seconds - before.seconds))
    assert found.tokens_per_second_per_user is None  # nobody is there any more
    counted = now.acceptance.since(before.acceptance)
    assert found.acceptance_length == counted.acceptance_length
    assert found.tokens_per_step == counted.tokens_per_step


def test_a_restart_leaves_counts_unknown() -> None:
    before = ServerReading(0.0, AcceptanceStatistics(9, 20, 9, [9], [9], {2: 9}), "x", generated=100)
    now = ServerReading(2.0, AcceptanceStatistics(1, 2, 1, [1], [1], {2: 1}), "x", generated=5, running=2)
    found = LiveFigures.between(before, now)
    assert (found.tokens_per_second, found.acceptance_length, found.widths) == (None, None, None)


def test_a_curve_has_a_gap_where_nothing_is_known() -> None:
    assert _curve(deque([0.0, None, 7.0])) == "▁ █"
    assert _curve(deque([None])) == " "

"""SGLang's own server exports all that the dashboard asks of it, and what routers are told to look for."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_sglang.facts import FACTS
from tests.sglang.test_tiny_server import deployment, pair
from tests.support.promql import exported, missing
from tests.support.sglang_server import Server, serving

SHALLOW = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""As the chart sets it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    with serving(deployment(pair(folder), width=3), folder, env=SHALLOW) as running:
        for prompt in ("the quick brown fox", "over the lazy dog"):
            stream(running, prompt)
        yield running


def stream(server: Server, prompt: str) -> None:
    """Only a stream has a time between tokens."""
    sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    body = json.dumps({"text": prompt, "sampling_params": sampling, "stream": True}).encode()
    url = f"http://127.0.0.1:{server.port}/generate"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read().rstrip().endswith(b"data: [DONE]")


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_it_exports_all_that_the_dashboard_asks_of_it(server: Server) -> None:
    assert missing("sglang", exported(get(server, FACTS.metrics.path))) == []


def test_it_exports_what_routers_are_told_to_look_for(server: Server) -> None:
    metrics = FACTS.metrics
    names = {metrics.queued, metrics.running, metrics.kv_cache_usage, metrics.acceptance_length}
    assert names <= set(exported(get(server, metrics.path)))


def test_its_probes_answer_where_we_say(server: Server, tmp_path: Path) -> None:
    for path in (FACTS.probes.started, FACTS.probes.live, FACTS.probes.ready):
        get(server, path)  # an HTTP error raises

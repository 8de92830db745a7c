"""The dashboard asks for nothing that the engine in question does not export: by name, and by label.

SGLang's and vLLM's own servers are asked in tests/sglang/test_tiny_server.py and tests/vllm/test_server.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_serve.adapter.facts import MetricNames
from dflash_serve.adapter.registry import backend, installed
from tests.support.debian import promtool
from tests.support.embedded import PROMPTS, tiny_engine
from tests.support.promql import BOARD, PREFIXES, asked, engines_of, exported, expressions, missing, variables
from tests.support.serving import MODEL, Running, running

HISTOGRAMS = {
    *("e2e_request_latency_seconds", "iteration_latency_seconds", "request_queue_time_seconds"),
    *("time_per_output_token_seconds", "time_to_first_token_seconds"),
}
GAUGES_AND_COUNTERS = {
    *("generation_tokens_total", "kv_cache_utilization", "num_requests_running", "num_requests_waiting"),
    *("prompt_tokens_total", "request_error_total", "request_success_total", "spec_decode_acceptance_length"),
    *("spec_decode_draft_overhead", "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
}
BY_POSITION = {"spec_decode_accepted_tokens_total", "spec_decode_drafted_tokens_total"}
TENSORRT_LLM = {
    **{f"trtllm_{name}_bucket": {"model_name", "engine_type", "le"} for name in HISTOGRAMS},
    **{f"trtllm_{name}": {"model_name", "engine_type"} for name in GAUGES_AND_COUNTERS},
    **{f"trtllm_{name}": {"model_name", "engine_type", "token_position"} for name in BY_POSITION},
}
"""Prometheus metrics that TensorRT-LLM documents, as far as a dashboard needs them: the docstring and labels of
tensorrt_llm/metrics/collector.py, NVIDIA/TensorRT-LLM main @050f80def8df (2026). It was never scraped by us."""


def test_every_expression_is_promql_over_the_chosen_namespace_and_release() -> None:
    assert len(expressions()) > 30
    for expression in expressions():
        assert asked(expression)
        release = 'pod=~"$release-.+"' if "kube_" in expression else 'app_kubernetes_io_instance=~"$release"'
        assert expression.count(f'namespace=~"$namespace", {release}') == expression.count("{")


def test_promtool_takes_every_expression(tmp_path: Path) -> None:
    """Prometheus' own program, of each as the rule that would record it."""
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run([promtool(), "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_every_engine_has_acceptance_survival_interactivity_queue_and_first_token() -> None:
    engines = {
        panel["title"]: {of for target in panel["targets"] for name in asked(target["expr"]) for of in engines_of(name)}
        for panel in BOARD["panels"]
        if panel["type"] != "row"
    }
    everyone = set().union(*PREFIXES.values())
    assert everyone == set(installed())
    assert engines.pop("Restarts") == set()  # of containers, by kube-state-metrics
    assert engines.pop("Refused") == {"torch", "sglang"}  # the others' are among the errors
    assert engines.pop("Width") == everyone - {"tensorrt-llm"}  # it reports none
    assert engines.pop("Speculative headroom") == everyone - {"tensorrt-llm"}  # no policy of ours chooses its widths
    assert engines.pop("Survival by slot") == everyone
    assert engines == dict.fromkeys(engines, everyone)
    assert {"Acceptance length", "Interactivity", "Queue", "Time to the first token"} <= set(engines)


def test_panels_neither_overlap_nor_share_a_number() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def for_routers(name: str) -> set[str]:
    """Gauges that routers and planners pick a server by, as far as the engine has them."""
    metrics: MetricNames = backend(name).facts.metrics
    names = (metrics.queued, metrics.running, metrics.kv_cache_usage, metrics.acceptance_length)
    return {name for name in names if name is not None}


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[Running]:
    with running(tiny_engine(pair)) as found:
        for prompt in PROMPTS:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
            httpx.post(f"{found.url}/v1/completions", json=body).raise_for_status()
        yield found


def test_the_embedded_server_exports_all_that_is_asked_of_it(server: Running) -> None:
    has = exported(httpx.get(server.url + backend("torch").facts.metrics.path).text)
    assert missing("torch", has) == []
    assert for_routers("torch") <= set(has)


def test_tensorrt_llm_documents_all_that_is_asked_of_it() -> None:
    assert missing("tensorrt-llm", TENSORRT_LLM) == []
    assert for_routers("tensorrt-llm") <= set(TENSORRT_LLM)


def test_the_variables_look_where_every_engine_is() -> None:
    for metrics, _ in variables():
        assert metrics == {backend(name).facts.metrics.running for name in installed()}

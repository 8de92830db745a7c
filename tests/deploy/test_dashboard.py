"""The dashboard asks for nothing that the engine in question does not export: by name, and by label.

SGLang's own server is asked in tests/sglang/test_dashboard_metrics.py, in the environment that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_serve.backend import backend
from dflash_serve.deploying import dashboard
from dflash_serve.deploying.endpoints import ENDPOINTS
from tests.support.embedded import PROMPTS, tiny_engine
from tests.support.promql import DASHBOARD, PREFIXES, asked, engine_of, exported, expressions, missing, variables
from tests.support.serving import MODEL, Running, running
from tests.support.tiny_target import write_tiny_pair

HISTOGRAMS = {
    "e2e_request_latency_seconds",
    "iteration_latency_seconds",
    "request_queue_time_seconds",
    "time_per_output_token_seconds",
    "time_to_first_token_seconds",
}
GAUGES_AND_COUNTERS = {
    "generation_tokens_total",
    "kv_cache_utilization",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_success_total",
    "spec_decode_acceptance_length",
    "spec_decode_draft_overhead",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
}
BY_POSITION = {"spec_decode_accepted_tokens_total", "spec_decode_drafted_tokens_total"}
TENSORRT_LLM = {
    **{f"trtllm_{name}_bucket": {"model_name", "engine_type", "le"} for name in HISTOGRAMS},
    **{f"trtllm_{name}": {"model_name", "engine_type"} for name in GAUGES_AND_COUNTERS},
    **{f"trtllm_{name}": {"model_name", "engine_type", "token_position"} for name in BY_POSITION},
}
"""What TensorRT-LLM documents of its Prometheus metrics, as far as a dashboard could care: the docstring and labels of
tensorrt_llm/metrics/collector.py, NVIDIA/TensorRT-LLM main @050f80def8df (2026). It was never scraped by us."""


def test_the_file_in_the_chart_is_what_the_code_makes() -> None:
    """After a wanted change: python -m dflash_serve.deploying.dashboard, into that file."""
    assert DASHBOARD.read_text() == dashboard.text()


def test_every_expression_is_promql_over_the_chosen_namespace_and_release() -> None:
    assert len(expressions()) > 30
    for expression in expressions():
        assert asked(expression)
        assert expression.count('namespace=~"$namespace", app_kubernetes_io_instance=~"$release"') == expression.count(
            "{"
        )


def test_every_engine_has_acceptance_survival_interactivity_queue_and_first_token() -> None:
    board = json.loads(DASHBOARD.read_text())
    engines = {
        panel["title"]: {engine_of(name) for target in panel["targets"] for name in asked(target["expr"])}
        for panel in board["panels"]
        if panel["type"] != "row"
    }
    everyone = set(PREFIXES.values())
    assert engines.pop("Width") == everyone - {"tensorrt-llm"}  # it reports none
    assert engines == dict.fromkeys(engines, everyone)
    assert {"Acceptance length", "Survival by slot", "Interactivity", "Queue", "Time to the first token"} <= set(
        engines
    )


def test_panels_neither_overlap_nor_share_a_number() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_engine(write_tiny_pair(tmp_path_factory.mktemp("pair")))) as found:
        for prompt in PROMPTS:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
            httpx.post(f"{found.url}/v1/completions", json=body).raise_for_status()
        yield found


def test_the_embedded_server_exports_all_that_is_asked_of_it(server: Running) -> None:
    has = exported(httpx.get(server.url + ENDPOINTS["torch"].metrics).text)
    assert missing("torch", has) == []
    endpoints = ENDPOINTS["torch"]
    assert {endpoints.queued, endpoints.running, endpoints.kv_cache_usage, endpoints.acceptance_length} <= set(has)


def test_tensorrt_llm_documents_all_that_is_asked_of_it() -> None:
    assert missing("tensorrt-llm", TENSORRT_LLM) == []
    endpoints = ENDPOINTS["tensorrt-llm"]
    asked_by_routers = {endpoints.queued, endpoints.running, endpoints.kv_cache_usage, endpoints.acceptance_length}
    assert asked_by_routers <= set(TENSORRT_LLM)


def test_a_name_that_is_misspelt_or_a_label_that_is_not_there_is_found(server: Running) -> None:
    has = exported(httpx.get(server.url + ENDPOINTS["torch"].metrics).text)
    survival = has.pop("dflash:spec_decode_survival")
    assert missing("torch", has) == ["dflash:spec_decode_survival['slot']"]
    has["dflash:spec_decode_survival"] = survival - {"slot"}
    assert missing("torch", has) == ["dflash:spec_decode_survival['slot']"]


def test_the_variables_look_where_every_engine_is() -> None:
    for metrics, _ in variables():
        assert metrics == {endpoints.running for endpoints in ENDPOINTS.values()}


@pytest.mark.parametrize("name", ["torch", "sglang"])
def test_routers_are_told_of_the_acceptance_length_that_the_backend_names(name: str) -> None:
    assert ENDPOINTS[name].acceptance_length == backend(name).metrics.acceptance_length  # type: ignore[index, attr-defined]


def test_the_dashboard_is_where_the_chart_looks() -> None:
    templates = DASHBOARD.parents[1] / "templates"
    assert "dashboards/*.json" in Path(templates / "dashboards.yaml").read_text()

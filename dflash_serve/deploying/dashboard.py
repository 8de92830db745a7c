"""Grafana's dashboard of speculation, latency, load and failures, in PromQL, for all installed backends.

Each panel has a query for each engine, so that the running engine fills it. Acceptance length counts the bonus token.
A figure that an engine does not report is empty, never 0. Grafana's model is schema 39 (Grafana 11).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflash_serve.adapter.facts import EngineFacts, Line
from dflash_serve.adapter.registry import backend, installed
from dflash_serve.common.prometheus import gauge, quantile, rate

Document = Mapping[str, object]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDE, HIGH = 8, 8  # of a panel; Grafana's grid is 24 wide


@dataclass(frozen=True)
class Panel:
    """One graph: a line for each engine that reports the figure; engines may have the same line."""

    title: str
    unit: str
    lines: Iterable[Line | None]
    """None = that engine does not report the figure."""
    about: str


def dashboard() -> Document:
    """The whole dashboard, from the facts of all installed backends."""
    engines = [backend(name).facts for name in installed()]
    rows = {**_speculation_and_latency(engines), **_load_and_failures(engines)}
    return {
        "uid": "dflash-serve",
        "title": "dflash-serve",
        "tags": ["dflash-serve", "speculative decoding"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(engines)},
        "panels": _placed(rows),
    }


def _speculation_and_latency(engines: Sequence[EngineFacts]) -> dict[str, list[Panel]]:
    metrics = [engine.metrics for engine in engines]
    lines = [each for engine in engines for each in (engine.speculation, engine.earlier) if each is not None]
    acceptance = "Tokens gained per verification, the bonus token counted; 1 = speculation gains nothing."
    survival = (
        "Probability that a drafted token is accepted, by its slot in the block. A slot 1 near 0 is a drafter that "
        "does not fit: `dflash-serve doctor`."
    )
    width = (
        "Verifications a second by slots verified, the anchor counted; 1 = speculation would not pay. "
        "TensorRT-LLM does not report widths."
    )
    headroom = (
        "Tokens of decoding steps by those that the width policy expected in the same time, at the same batch: less "
        "than 1 where prompts and waiting take time from it. With `width: auto`; TensorRT-LLM has no policy of ours."
    )
    user = "Tokens a second that one user sees: one over the median time between tokens."
    speeds = [("tokens/s a user", f"1 / {quantile(0.5, each.inter_token_latency)}") for each in metrics]
    between = _quantiles(each.inter_token_latency for each in metrics)
    first = _quantiles(each.time_to_first_token for each in metrics)
    return {
        "Speculation": [
            Panel("Acceptance length", "short", [each.acceptance_length for each in lines], acceptance),
            Panel("Survival by slot", "percentunit", [each.survival for each in lines], survival),
            Panel("Width", "ops", [each.widths for each in lines], width),
            Panel("Speculative headroom", "percentunit", [each.headroom for each in lines], headroom),
        ],
        "Latency": [
            Panel("Interactivity", "short", speeds, user),
            Panel("Time between tokens", "s", between, "Inter-token latency; of a request, over its answer."),
            Panel("Time to the first token", "s", first, "From arrival; includes the time in the queue."),
        ],
    }


RESTARTS = 'kube_pod_container_status_restarts_total{container="server", namespace=~"$namespace", pod=~"$release-.+"}'
"""A metric of kube-state-metrics, which has labels of pods, not of releases."""


def _load_and_failures(engines: Sequence[EngineFacts]) -> dict[str, list[Panel]]:
    metrics = [engine.metrics for engine in engines]
    queued = [("{{pod}}", gauge(each.queued)) for each in metrics]
    running = [("{{pod}}", gauge(each.running)) for each in metrics if each.running]
    generated = [("{{pod}}", rate(each.generated, by="pod")) for each in metrics]
    used = [("{{pod}}", gauge(each.kv_cache_usage, fold="max")) for each in metrics if each.kv_cache_usage]
    waited = _quantiles(each.queue_time for each in metrics)
    whole = _quantiles(each.request_latency for each in metrics)
    restarts = [("{{pod}}", f"sum by (pod) (increase({RESTARTS}[1h]))")]
    full = "Share of the cache; near 1, requests are put back into the queue."
    errors = "Requests a second that failed, by status where the engine tells it."
    refused = (
        "Requests refused a second, 429 and 503: the queue is full, or the server not ready. vLLM and "
        "TensorRT-LLM count them as errors."
    )
    return {
        "Load": [
            Panel("Queue", "short", queued, "Waiting requests; autoscaling reads them."),
            Panel("Running", "short", running, "Requests in the batch."),
            Panel("Time in the queue", "s", waited, "From arrival to the first step."),
            Panel("Tokens", "short", generated, "Generated a second."),
            Panel("K/V in use", "percentunit", used, full),
            Panel("Whole answers", "s", whole, "From arrival to the last token."),
        ],
        "Failures": [
            Panel("Errors", "reqps", [engine.errors for engine in engines], errors),
            Panel("Refused", "reqps", [engine.refused for engine in engines], refused),
            Panel("Restarts", "short", restarts, "Of engines within an hour, by kube-state-metrics."),
        ],
    }


def _quantiles(histograms: Iterable[str]) -> list[Line]:
    """Median and 99th percentile of each histogram."""
    return [(f"p{100 * q:.0f}", quantile(q, name)) for name in histograms for q in (0.5, 0.99)]


def _placed(rows: Mapping[str, Sequence[Panel]]) -> list[Document]:
    """Rows and their panels with their places on Grafana's grid, numbered from 1."""
    panels: list[Document] = []
    for title, row in rows.items():
        top = HIGH * len(panels)  # far enough below: Grafana closes the gaps
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        panels += [_graph(panel, len(panels) + 1 + i, top + 1, i) for i, panel in enumerate(row)]
    return panels


def _graph(panel: Panel, number: int, top: int, index: int) -> Document:
    across = 24 // WIDE
    place = {"x": WIDE * (index % across), "y": top + HIGH * (index // across), "w": WIDE, "h": HIGH}
    defaults = {"unit": panel.unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(dict.fromkeys(filter(None, panel.lines)))
        ],
    }


def _variables(engines: Sequence[EngineFacts]) -> list[Document]:
    running = "|".join(engine.metrics.running for engine in engines if engine.metrics.running)
    metric = f'__name__=~"{running}"'
    many = {"type": "query", "datasource": SOURCE, "multi": True, "includeAll": True, "refresh": 2}
    many["current"] = {"text": "All", "value": "$__all"}
    releases = f'label_values({{{metric}, namespace=~"$namespace"}}, app_kubernetes_io_instance)'
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {**many, "name": "namespace", "label": "Namespace", "query": f"label_values({{{metric}}}, namespace)"},
        {**many, "name": "release", "label": "Release", "query": releases},
    ]

"""Grafana's dashboard of speculation, latency, load and failures, in PromQL, for all installed backends.

Each panel has a query for each engine, so that the running engine fills it. Acceptance length counts the bonus token.
A figure that an engine does not report is empty, never 0. Grafana's model is schema 39 (Grafana 11).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflash_serve.backend import EngineFacts, Line, backend, installed
from dflash_serve.common.prometheus import gauge, quantile, rate

Document = Mapping[str, object]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDE, HIGH = 8, 8  # of a panel; Grafana's grid is 24 wide


@dataclass(frozen=True)
class Panel:
    """One graph: a line for each engine that reports the figure."""

    title: str
    about: str
    unit: str
    lines: Sequence[Line]


def dashboard() -> Document:
    """The whole dashboard, from the facts of all installed backends."""
    engines = [backend(name).facts for name in installed()]
    rows = {
        "Speculation": _speculation(engines),
        "Latency": _experience(engines),
        "Load": _load(engines),
        "Failures": _failures(engines),
    }
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


def _speculation(engines: Sequence[EngineFacts]) -> list[Panel]:
    lines = [engine.speculation for engine in engines]
    return [
        Panel(
            "Acceptance length",
            "Tokens gained per verification, the bonus token counted; 1 = speculation gains nothing.",
            "short",
            [each.acceptance_length for each in lines],
        ),
        Panel(
            "Survival by slot",
            "Probability that a drafted token is accepted, by its slot in the block. A slot 1 near 0 is a drafter that "
            "does not fit: `dflash-serve doctor`.",
            "percentunit",
            [each.survival for each in lines if each.survival is not None],
        ),
        Panel(
            "Width",
            "Verifications a second by slots verified, the anchor counted; 1 = speculation would not pay. "
            "TensorRT-LLM does not report widths.",
            "ops",
            [each.widths for each in lines if each.widths is not None],
        ),
    ]


def _experience(engines: Sequence[EngineFacts]) -> list[Panel]:
    between = [engine.metrics.inter_token_latency for engine in engines]
    return [
        Panel(
            "Interactivity",
            "Tokens a second that one user sees: one over the median time between tokens.",
            "short",
            [("tokens/s a user", f"1 / {quantile(0.5, name)}") for name in between],
        ),
        Panel("Time between tokens", "Inter-token latency; of a request, over its answer.", "s", _quantiles(between)),
        Panel(
            "Time to the first token",
            "From arrival; includes the time in the queue.",
            "s",
            _quantiles(engine.metrics.time_to_first_token for engine in engines),
        ),
    ]


def _load(engines: Sequence[EngineFacts]) -> list[Panel]:
    metrics = [engine.metrics for engine in engines]
    running = [("{{pod}}", gauge(each.running)) for each in metrics if each.running]
    used = [("{{pod}}", gauge(each.kv_cache_usage, fold="max")) for each in metrics if each.kv_cache_usage]
    return [
        Panel(
            "Queue",
            "Waiting requests; autoscaling reads them.",
            "short",
            [("{{pod}}", gauge(each.queued)) for each in metrics],
        ),
        Panel("Running", "Requests in the batch.", "short", running),
        Panel(
            "Time in the queue",
            "From arrival to the first step.",
            "s",
            _quantiles(each.queue_time for each in metrics),
        ),
        Panel(
            "Tokens", "Generated a second.", "short", [("{{pod}}", rate(each.generated, by="pod")) for each in metrics]
        ),
        Panel("K/V in use", "Share of the cache; near 1, requests are put back into the queue.", "percentunit", used),
        Panel(
            "Whole answers",
            "From arrival to the last token.",
            "s",
            _quantiles(each.request_latency for each in metrics),
        ),
    ]


RESTARTS = 'kube_pod_container_status_restarts_total{container="server", namespace=~"$namespace", pod=~"$release-.+"}'
"""A metric of kube-state-metrics, which has labels of pods, not of releases."""


def _failures(engines: Sequence[EngineFacts]) -> list[Panel]:
    return [
        Panel(
            "Errors",
            "Requests a second that failed, by status where the engine tells it.",
            "reqps",
            [engine.errors for engine in engines if engine.errors is not None],
        ),
        Panel(
            "Refused",
            "Requests refused a second, 429 and 503: the queue is full, or the server not ready. vLLM and "
            "TensorRT-LLM count them as errors.",
            "reqps",
            [engine.refused for engine in engines if engine.refused is not None],
        ),
        Panel(
            "Restarts",
            "Of engines within an hour, by kube-state-metrics.",
            "short",
            [("{{pod}}", f"sum by (pod) (increase({RESTARTS}[1h]))")],
        ),
    ]


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
            for i, (legend, expression) in enumerate(panel.lines)
        ],
    }


def _variables(engines: Sequence[EngineFacts]) -> list[Document]:
    running = "|".join(engine.metrics.running for engine in engines if engine.metrics.running)
    many = {"type": "query", "datasource": SOURCE, "multi": True, "includeAll": True, "refresh": 2}
    everything = {"text": "All", "value": "$__all"}
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            **many,
            "name": "namespace",
            "label": "Namespace",
            "query": f'label_values({{__name__=~"{running}"}}, namespace)',
            "current": everything,
        },
        {
            **many,
            "name": "release",
            "label": "Release",
            "query": f'label_values({{__name__=~"{running}", namespace=~"$namespace"}}, app_kubernetes_io_instance)',
            "current": everything,
        },
    ]

"""The Grafana dashboard around the panels; `python -m dflash_serve.deploying.dashboard` prints the chart's file."""

from __future__ import annotations

import json

from .dashboard_panels import ROWS, Panel
from .endpoints import ENDPOINTS
from .workload import Document

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDE, HIGH = 8, 8
"""Grafana's grid is 24 wide."""


def dashboard() -> Document:
    """Grafana's model of it (schema 39, Grafana 11)."""
    panels: list[Document] = []
    for title, row in ROWS.items():
        top = HIGH * len(panels)  # far enough below: Grafana closes the gaps
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        panels += [_graph(panel, len(panels) + 1 + i, top + 1, i) for i, panel in enumerate(row)]
    return {
        "uid": "dflash-serve",
        "title": "dflash-serve",
        "tags": ["dflash-serve", "speculative decoding"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


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


def _variables() -> list[Document]:
    running = "|".join(str(endpoints.running) for endpoints in ENDPOINTS.values())
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


def text() -> str:
    """As it stands in the chart."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")

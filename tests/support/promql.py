"""The metrics and labels in a dashboard's PromQL, by a real PromQL parser, and those of an engine's /metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from dflash_serve.deploying.dashboard import dashboard

BOARD: Any = dashboard()
SCRAPED = {"namespace", "pod", "app_kubernetes_io_instance"}
"""Labels that come from Prometheus, by the chart's PodMonitor, and from no engine."""
PREFIXES = {
    "dflash:": {"torch"},
    "dflash_serve:": {"sglang", "torch", "vllm"},
    "dflash_vllm:": {"vllm"},
    "http_requests_total": {"vllm"},
    "sglang:": {"sglang"},
    "trtllm_": {"tensorrt-llm"},
    "vllm:": {"vllm"},
}

Labels = dict[str, set[str]]
"""Name of a series -> the labels that somebody asks for, or that it has."""


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard, as it stands there."""
    return [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]


def variables() -> Iterator[tuple[set[str], str]]:
    """Metrics and label of each `label_values(selector, label)`."""
    for variable in BOARD["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]) if variable["type"] == "query" else None
        if asked:
            selector: Any = promql_parser.parse(asked[1])
            (matcher,) = [m for m in selector.matchers.matchers if m.name == "__name__"]
            yield set(matcher.value.split("|")), asked[2]


def engines_of(metric: str) -> set[str]:
    """By its prefix; none for Kubernetes' own, by kube-state-metrics."""
    if metric.startswith("kube_"):
        return set()
    return next(engines for prefix, engines in PREFIXES.items() if metric.startswith(prefix))


def asked(expression: str) -> Labels:
    """The series that an expression selects, and the labels it matches or groups by."""
    tree = promql_parser.parse(expression.replace("$__rate_interval", "5m"))  # Grafana's own variable
    found: Labels = defaultdict(set)
    for selector, grouped in _selectors(tree, frozenset()):
        found[selector.name] |= {matcher.name for matcher in selector.matchers.matchers} | grouped
    return {name: labels - SCRAPED for name, labels in found.items()}


def _selectors(node: Any, grouped: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node, grouped
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from _selectors(node.vector_selector, grouped)
    elif isinstance(node, promql_parser.AggregateExpr):
        yield from _selectors(node.expr, grouped | frozenset(node.modifier.labels if node.modifier else ()))
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _selectors(argument, grouped)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from _selectors(node.lhs, grouped)
        yield from _selectors(node.rhs, grouped)
    elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr | promql_parser.SubqueryExpr):
        yield from _selectors(node.expr, grouped)
    else:
        assert isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral), node


def exported(text: str) -> Labels:
    """The series of a /metrics page, with their labels."""
    found: Labels = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def missing(engine: str, has: Mapping[str, set[str]]) -> list[str]:
    """Metrics and labels that the dashboard asks this engine for and that it does not have."""
    wanted = [(name, labels) for expression in expressions() for name, labels in asked(expression).items()]
    return sorted(
        {
            f"{name}{sorted(labels - has.get(name, set()))}"
            for name, labels in wanted
            if engine in engines_of(name) and (name not in has or labels - has[name])
        }
    )

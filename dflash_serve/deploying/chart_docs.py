"""What people read of our Helm chart: the descriptions in its schema, and its README in helm-docs' form."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import ModuleType
from typing import Any

INTRODUCTION = """# dflash-serve

A target and its DFlash drafter behind an OpenAI-compatible API, on SGLang, vLLM, TensorRT-LLM or PyTorch.
From an empty node to a verified endpoint: [deploy/README.md](../../README.md).
The smallest values, Argo CD and Flux: [examples/helm](../../../examples/helm).
An unknown key is refused; what cannot work is refused before anything is installed, all of it at once.

## Requirements

Kubernetes 1.30 or newer (1.31: replicas kept together; 1.32: `placement.computeDomain`; 1.33: `models.kind: image`),
Helm 3.17 or newer. Where asked for: LeaderWorkerSet (several nodes), KEDA, the operators of Prometheus and Grafana,
Gateway API and its inference extension, NVIDIA's DRA driver.

## Values

`deployment` is [the deployment file](../../../docs/deployment.md), word for word.

"""
HEADER = "| Key | Type | Default | Description |\n|-----|------|---------|-------------|\n"


def attribute_docs(module: ModuleType) -> dict[str, dict[str, str]]:
    """Class -> attribute -> the text below it, of a module's classes.

    Pydantic can read it too, but only while the classes are made, which every start of the command line would wait for.
    """
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = dict(_documented(node))
    return found


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(node.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield field.target.id, " ".join(str(text.value.value).split())


def readme(schema: Mapping[str, Any]) -> str:
    """The chart's README: every value with its type, default and meaning."""
    rows = [f"| {key} | {kind} | {default} | {text} |" for key, kind, default, text in _values(schema, schema, "")]
    return INTRODUCTION + HEADER + "\n".join(rows) + "\n"


def _values(schema: Mapping[str, Any], node: Mapping[str, Any], above: str) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every value below a node, sections opened."""
    for name, inner in node.get("properties", {}).items():
        path, section = f"{above}{name}", _section(schema, inner)
        if path in ("deployment", "global"):
            continue
        if section is not None and path != "engine":
            yield from _values(schema, section, f"{path}.")
            continue
        default = json.dumps(inner.get("default")) if "default" in inner else "required"
        text = inner.get("description", "").replace("|", "\\|")
        yield path, _type(inner), f"`{default}`", " ".join(text.split())


def _section(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    reference = node.get("$ref", "").rpartition("/")[2]
    return schema["definitions"][reference] if reference else None


def _type(node: Mapping[str, Any]) -> str:
    kinds = [branch.get("type", "object") for branch in node.get("anyOf", [node])]
    kind = str(kinds[0])
    return {"array": "list", "integer": "int", "boolean": "bool"}.get(kind, kind)

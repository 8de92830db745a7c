"""values.schema.json of the chart, from the types of `chart_values` and the Deployment: `python -m` writes it anew."""

from __future__ import annotations

import json
from typing import Any

from .chart import chart
from .chart_values import Values

FILE = "values.schema.json"
DIALECT = "http://json-schema.org/draft-07/schema#"
"""Helm 3's validator knows no later one."""
GLOBAL = {"type": "object", "description": "Helm gives every subchart these; none is read."}


def values_schema() -> dict[str, Any]:
    """The JSON Schema, in the dialect that both Helm versions read."""
    schema = _draft_07(Values.model_json_schema(by_alias=True))
    definitions = schema.pop("definitions")
    schema["properties"]["global"] = GLOBAL
    return {"$schema": DIALECT, "title": "dflash-serve", **schema, "definitions": definitions}


def text() -> str:
    """The file, as it is written."""
    return json.dumps(values_schema(), indent=2, sort_keys=False) + "\n"


def _draft_07(node: Any) -> Any:
    """$defs were called definitions, and pydantic's titles only repeat the names of keys."""
    if isinstance(node, list):
        return [_draft_07(value) for value in node]
    if not isinstance(node, dict):
        return node
    renamed = {"definitions" if key == "$defs" else key: _draft_07(value) for key, value in node.items()}
    if "$ref" in renamed:
        renamed["$ref"] = renamed["$ref"].replace("#/$defs/", "#/definitions/")
    return {key: value for key, value in renamed.items() if key != "title" or not isinstance(value, str)}


if __name__ == "__main__":
    (chart() / FILE).write_text(text(), encoding="utf-8")

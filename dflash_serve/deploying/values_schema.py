"""The JSON Schema of the chart's values, by which helm refuses unknown keys, wrong types and impossible numbers.

values.yaml has each value once, with its default and a comment. The schema takes the type from the default and the
description from the comment. `RULES` adds what a default cannot tell: choices, ranges, patterns, and the keys that have
no default. The schema of `deployment` is that of the Deployment class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.deployment.description import Deployment

Schema = dict[str, Any]

DRAFT_7 = "http://json-schema.org/draft-07/schema#"  # helm 3 knows no later one
TEXT: Schema = {"type": "string"}
LINE: Schema = {"type": "string", "pattern": r"^[^\x00-\x1f\x7f]*$"}
"""Text of a template's line: a newline in it could add keys, such as `privileged: true`, to a pod."""
TEXTS: Schema = {"additionalProperties": TEXT}
OBJECTS: Schema = {"items": {"type": "object"}}
QUANTITY = r"[1-9][0-9]*([kMGT]|[KMGT]i)?"
CPUS = r"[1-9][0-9]*m?|[0-9]+\.[0-9]+"
DIGEST = "sha256:[0-9a-f]{64}"
NAME_WITHOUT_TAG = "([^@:/\\s]+(:[0-9]+)?/)?[^@:\\s]+"
OBJECT_NAME = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
ADDRESS = "https?://.+"


def _choice(*options: str) -> Schema:
    return {"enum": list(options)}


def _least(number: float, *, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": number}


def _pattern(pattern: str) -> Schema:
    return {"pattern": f"^({pattern})$"}


def _optional(pattern: str) -> Schema:
    """The empty string, which means "not given", or the pattern."""
    return {"pattern": f"^({pattern})?$"}


def _closed(properties: Mapping[str, Schema], *, required: tuple[str, ...] = ()) -> Schema:
    schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
ABOVE_0: Schema = {"type": "number", "exclusiveMinimum": 0}
KEY_OF = _closed({"name": TEXT, "key": TEXT, "optional": {"type": "boolean"}}, required=("name", "key"))
FIELD_OF = _closed({"fieldPath": TEXT}, required=("fieldPath",))
VALUE_FROM = {
    **_closed({"secretKeyRef": KEY_OF, "configMapKeyRef": KEY_OF, "fieldRef": FIELD_OF}),
    **{"minProperties": 1, "maxProperties": 1},
}
VARIABLE = {
    **_closed({"name": TEXT, "value": TEXT, "valueFrom": VALUE_FROM}, required=("name",)),
    **{"minProperties": 2, "maxProperties": 2},  # name, and a value or a valueFrom
}
PROBES = ("started", "live", "ready")
METRICS = (
    *("running", "generated", "interTokenLatency", "queueTime", "acceptanceLength", "survival", "widths"),
    *("tokensGained", "tokensExpected"),
)
ENGINE = _closed(
    {
        "probes": _closed(dict.fromkeys(PROBES, LINE), required=PROBES),
        "metricsPath": LINE,
        "queued": LINE,
        **{name: {**LINE, "type": ["string", "null"]} for name in METRICS},
        "needsGpu": {"type": "boolean"},
        "serverFlags": {"type": "array", "items": LINE},
        "environment": {"type": "object", **TEXTS},
        "prefillAnnotations": {"type": "object", **TEXTS},
    },
    required=("probes", "metricsPath", "queued", "needsGpu"),
)
ADDED: Mapping[str, Schema] = {
    "global": {"type": "object", "description": "Helm gives these values to every subchart; this chart reads none."},
    "engine": {
        **ENGINE,
        "description": "Probes and metric names of a backend that the chart does not know; "
        "`dflash-serve deploy --render helm` writes them.",
    },
    "startup.gigabytes": {
        **ABOVE_0,
        "description": "Weights of target and drafter [default: as much as the GPUs hold].",
    },
}
"""Keys without a default: those that values.yaml shows in a comment, and Helm's own."""
RULES: Mapping[str, Schema] = {
    "image.repository": _pattern(NAME_WITHOUT_TAG),
    "image.digest": _pattern(DIGEST),
    "image.pullPolicy": _choice("IfNotPresent", "Always", "Never"),
    "image.pullSecrets": {"items": {**TEXT, **_pattern(OBJECT_NAME)}},
    **{f"placement.{name}": _optional(OBJECT_NAME) for name in ("runtimeClassName", "priorityClassName")},
    "replicas": _least(1),
    "pair.decodeHostGi": _least(0),
    "pair.router.image.repository": _optional(NAME_WITHOUT_TAG),
    "pair.router.image.digest": _optional(DIGEST),
    "pair.router.replicas": _least(1),
    "pair.router.cpu": _pattern(CPUS),
    "pair.router.memory": _pattern(QUANTITY),
    "pair.router.args": {"items": LINE},
    "resources.cpu": _optional(CPUS),
    "resources.memory": _optional(QUANTITY),
    "resources.extra": {"additionalProperties": {**LINE, "type": ["string", "integer"]}},
    "placement.computeCapability": _optional(r"[0-9]+\.[0-9]+"),
    "placement.architecture": _choice("", "amd64", "arm64"),
    "placement.tolerations": OBJECTS,
    "models.kind": _choice("emptyDir", "volume", "claim", "node", "image"),
    "models.size": _pattern(QUANTITY),
    "models.accessMode": _choice("ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"),
    "models.path": _optional("/.+"),
    "models.image": _optional(f".+@{DIGEST}"),
    "models.encodings": _optional("/models/.+"),
    "models.download.deadlineSeconds": _least(60),
    "cache.kind": _choice("emptyDir", "models", "node"),
    "cache.path": _optional("/.+"),
    "secrets.huggingFaceToken.key": {"minLength": 1},
    "secrets.apiKeys.key": {"minLength": 1},
    "build.recipe": {"pattern": ""},  # a file: its lines stay
    "build.image.repository": _optional(NAME_WITHOUT_TAG),
    "build.image.digest": _optional(DIGEST),
    "build.cpu": _pattern(CPUS),
    "build.memory": _pattern(QUANTITY),
    "build.deadlineSeconds": _least(60),
    "certify.minutes": _least(1, kind="number"),
    "certify.concurrency": _pattern("[1-9][0-9]*(,[1-9][0-9]*)*"),
    "certify.deadlineSeconds": _least(60),
    "startup.baseSeconds": _least(30),
    "startup.gigabytesPerSecond": ABOVE_0,
    **{f"drain.{name}": _least(1) for name in ("preStopSeconds", "seconds", "marginSeconds")},
    "disruption.maxUnavailable": _least(1),
    "autoscaling.scaleDownSeconds": {**_least(0), "maximum": 3600},
    "autoscaling.kind": _choice("none", "hpa", "keda"),
    **{f"autoscaling.{name}": _least(1) for name in ("minReplicas", "maxReplicas", "queuedPerReplica")},
    "autoscaling.interTokenSeconds": _least(0, kind="number"),
    "autoscaling.headroom": {**_least(0, kind="number"), "maximum": 1},
    "autoscaling.prometheusAddress": _optional(ADDRESS),
    "service.type": _choice("ClusterIP", "NodePort", "LoadBalancer"),
    "service.port": PORT,
    "route.canary.weight": {**_least(0), "maximum": 100},
    "inferencePool.endpointPickerPort": PORT,
    "networkPolicy.egressPorts": {"items": PORT},
    "networkPolicy.dnsPorts": {"items": PORT},
    "podMonitor.intervalSeconds": _least(1),
    "alerts.acceptanceLength": _least(1, kind="number"),
    "alerts.survival": {**_least(0, kind="number"), "maximum": 1},
    "alerts.queueSeconds": ABOVE_0,
    "dashboards.labels": TEXTS,
    "sharedMemory": _pattern(QUANTITY),
    "scratch": _pattern(QUANTITY),
    "user": {"type": ["integer", "null"], "minimum": 1},
    "security.capabilities": {"items": _choice("IPC_LOCK", "SYS_NICE", "SYS_PTRACE")},
    "security.supplementalGroups": {"items": {"type": "integer"}},
    "tests.verify.without": _optional(ADDRESS),
    "tests.verify.deadlineSeconds": _least(1),
    "tests.acceptance.atLeast": _least(0, kind="number"),
    "env": {"items": VARIABLE},
    "extraVolumes": OBJECTS,
    "extraVolumeMounts": OBJECTS,
    "initContainers": OBJECTS,
    "fullnameOverride": _optional("[a-z]([-a-z0-9]{0,38}[a-z0-9])?"),
}


def values_schema(values: Path) -> Schema:
    """The schema of a values.yaml, for helm 3 and 4.

    Raises:
        ValueError: a rule names a key that values.yaml does not have.
    """
    text = values.read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    described = dict(_comments(text))
    found = set[str]()
    schema = _of_mapping(defaults, described, found, above="")
    if unknown := RULES.keys() - found:
        raise ValueError(f"{values} has no {', '.join(sorted(unknown))}")
    deployment = _untitled(Deployment.model_json_schema(ref_template="#/definitions/{model}"))
    definitions = deployment.pop("$defs")
    definitions["Speculation"]["properties"]["width"]["anyOf"].append({"const": False})  # helm reads `off` so
    schema["properties"]["deployment"] = {**deployment, "description": described["deployment"]}
    for path, added in ADDED.items():
        section, _, name = path.rpartition(".")
        (schema["properties"][section] if section else schema)["properties"][name] = added
    return {
        "$schema": DRAFT_7,
        "title": "dflash-serve",
        **schema,
        "required": ["deployment"],
        "definitions": definitions,
    }


def _of_mapping(defaults: Mapping[str, Any], described: Mapping[str, str], found: set[str], *, above: str) -> Schema:
    properties = {}
    for name, default in defaults.items():
        path = f"{above}{name}"
        found.add(path)
        inner: Schema = {"description": described[path]} if path in described else {}
        if isinstance(default, Mapping) and default and path not in RULES:
            inner |= _of_mapping(default, described, found, above=f"{path}.")
        else:
            inner |= {**_of_default(default), **RULES.get(path, {}), "default": default}
        properties[name] = inner
    return _closed(properties)


def _of_default(default: object) -> Schema:
    # texts in mappings, no negative numbers; a key that may hold anything else has a rule
    kinds: dict[type, Schema] = {
        **{list: {"type": "array", "items": LINE}, dict: {"type": "object", **TEXTS}},
        **{str: LINE, bool: {"type": "boolean"}, int: _least(0), float: _least(0, kind="number")},
    }
    return kinds[type(default)]


def _comments(text: str) -> Iterator[tuple[str, str]]:
    """Path of each key that has a line of its own, and the comment behind it or in the lines before it."""
    sections: list[tuple[int, str]] = []
    before: list[str] = []
    for line in text.splitlines():
        if line.startswith("# ") and not line.startswith("#   "):
            before.append(line.removeprefix("# "))
            continue
        if key := re.match(r"( *)(\w+):(.*)", line):
            depth, name, rest = len(key[1]), key[2], key[3]
            sections = [(outer, path) for outer, path in sections if outer < depth]
            path = f"{sections[-1][1]}.{name}" if sections else name
            sections.append((depth, path))
            behind = re.search(r"(?:^|\s)# (.+)", rest)
            if behind or before:
                yield path, behind[1] if behind else " ".join(before)
        before = before if line.startswith("#") else []


def _untitled(node: Any) -> Any:
    """The schema without pydantic's titles, which repeat the names of keys; texts are lines."""
    if isinstance(node, list):
        return [_untitled(value) for value in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _untitled(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    return {**LINE, **kept} if kept.get("type") == "string" and "enum" not in kept and "const" not in kept else kept

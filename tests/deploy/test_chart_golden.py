"""Golden files: one for each engine and form of `deploy`.

`ENGINE.values.yaml` is what `deploy --render helm` makes of examples/deployments; `ENGINE.manifests.yaml` is what the
chart makes of one installation. After a wanted change: GOLDEN=write make test-deploy, and read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from tests.support.chart import BACKENDS, CASES, DIGEST, HELMS, ROOT, Manifest, case, lint, notes, render
from tests.support.offline_hub import offline_hub

GOLDEN = Path(__file__).parent / "golden"
INSTALLED = {
    "torch": "torch-on-a-cpu",
    "sglang": "sglang-in-one-nvlink-domain",
    "tensorrt-llm": "tensorrt-llm-with-a-built-drafter",
    "vllm": "vllm",
}


def check(name: str, found: list[Any]) -> None:
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump_all(found, sort_keys=True, width=130, default_flow_style=None))
    assert found == list(yaml.safe_load_all(file.read_text())), f"{file.name}: GOLDEN=write, and read the difference"


@pytest.mark.parametrize("backend", BACKENDS)
def test_deploy_writes_these_values(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline_hub(tmp_path, monkeypatch)
    file, image = ROOT / "examples" / "deployments" / f"{backend}.yaml", f"registry.example/{backend}@{DIGEST}"
    words = ["deploy", str(file), "--render", "helm", "--backend", backend, "--image", image]
    result = CliRunner().invoke(app, words)
    assert result.exception is None
    check(f"{backend}.values", [yaml.safe_load(result.stdout)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_chart_makes_these_manifests(backend: str) -> None:
    for layer in HELMS:
        check(f"{backend}.manifests", [_shortened(document) for document in render(case(INSTALLED[backend]), layer)])


@pytest.mark.parametrize("name", CASES)
def test_helm_lints_every_installation(name: str) -> None:
    for layer in HELMS:
        assert lint(case(name), layer) == ""


def _shortened(document: Manifest) -> Manifest:
    """The document without the text of scripts and dashboards, and without the digest of them."""
    shown = {**document}
    if document["kind"] == "ConfigMap":
        files = {name: "" if name.endswith((".py", ".json")) else text for name, text in document["data"].items()}
        shown["data"] = files
    return _without_digest(shown)


def _without_digest(node: Manifest) -> Manifest:
    return {
        key: "" if key == "dflash-serve/config" else _without_digest(value) if isinstance(value, dict) else value
        for key, value in node.items()
    }


def test_the_notes_say_what_to_do_next() -> None:
    text = notes(case("tensorrt-llm-with-a-built-drafter"))
    assert "Qwen/Qwen3-8B on tensorrt-llm, with speculation" in text
    assert re.search(r"The build \w{12} is there", text)
    assert "helm -n serving test trial" in text
    assert "deployment.target.revision is not set" in text
    assert "revision is not set" not in notes(case("sglang"))

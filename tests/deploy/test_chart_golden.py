"""What the chart renders for real installations, by both helms, is what is written down beside their values.

After a wanted change: GOLDEN=write make test-deploy, and read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.support.chart import HELMS, Manifest, lint, notes, render
from tests.support.helm import HELM_4

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name.removesuffix(".values.yaml") for path in GOLDEN.glob("*.values.yaml"))


def case(name: str) -> Manifest:
    """Its values."""
    given: Manifest = yaml.safe_load((GOLDEN / f"{name}.values.yaml").read_text())
    return given


@pytest.mark.parametrize("name", CASES)
def test_both_helms_render_what_is_written_down(name: str) -> None:
    given, file = case(name), GOLDEN / f"{name}.yaml"
    if os.environ.get("GOLDEN") == "write":
        documents = [_shortened(document) for document in render(given, HELM_4)]
        file.write_text(yaml.safe_dump_all(documents, sort_keys=True, width=120))
    wanted = list(yaml.safe_load_all(file.read_text()))
    for layer in HELMS:
        assert [_shortened(document) for document in render(given, layer)] == wanted
        assert lint(given, layer) == ""


def _shortened(document: Manifest) -> Manifest:
    """Without the texts of files that are tested where they stand, and the digest of them."""
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

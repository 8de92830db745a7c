"""The commands of Edge-LLM name every drafter that was made, and are labelled as not built here."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_engines.commands import LABEL, write_commands
from dflash_engines.pipeline import Work


def test_each_quantised_drafter_is_exported_and_built(tmp_path: Path) -> None:
    inputs = {"drafter": tmp_path, "drafter-fp8": tmp_path, "drafter-ranges": tmp_path}
    write_commands(Work(tmp_path, inputs, lambda line: None))
    written = json.loads((tmp_path / "commands.json").read_text())
    assert written["label"] == LABEL
    assert list(written["commands"]) == ["edge-llm export drafter-fp8", "edge-llm build drafter-fp8"]

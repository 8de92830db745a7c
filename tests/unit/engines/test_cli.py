"""`dflash-serve build`: shows its plan, and finds what was changed in a finished build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_engines.pipeline import Measured, Source, Step, Work, run
from dflash_serve.cli.main import app

RECIPE = str(Path(__file__).parents[3] / "engines" / "recipes" / "smollm2.yaml")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["build", *arguments])
    return result.exit_code, result.output


def test_a_dry_run_lists_the_steps_and_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROMPTS", raising=False)
    code, text = invoke(RECIPE, "--dry-run")
    assert code == 0
    assert text.index("drafter-ranges") < text.index("drafter-fp8")
    assert "acceptance is left out" in text
    # 134.5 million parameters of 2 bytes, and the drafter's 12.3: FP8 and NVFP4 targets, three sets of rank files.
    assert "disk: about 1.14 GB" in text
    assert "memory: 0.29 GB of weights in bf16" in text
    assert "asks the built-in prompts for at most 32 tokens each" in text
    assert list(tmp_path.iterdir()) == []


def test_the_plan_is_there_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMPTS", raising=False)
    code, text = invoke(RECIPE, "--dry-run", "--json")
    assert code == 0
    steps = {step["step"]: step["needs"] for step in json.loads(text)}
    assert all(step["about"] for step in json.loads(text))
    assert steps == {
        "answers": ["target"],
        "drafter-ranges": ["target", "drafter", "answers"],
        "target-fp8": ["target", "answers"],
        "target-nvfp4": ["target", "answers"],
        "trtllm-checkpoints": ["target", "answers"],
        "drafter-fp8": ["drafter", "drafter-ranges"],
        "drafter-nvfp4": ["drafter", "drafter-ranges"],
    }


def test_verify_ends_with_1_where_a_byte_was_flipped(tmp_path: Path) -> None:
    def write(work: Work) -> Measured:
        (work.folder / "engine").write_bytes(bytes(100))
        return {}

    run([Step("drafter", write, ("source",))], {"source": Source(tmp_path, "0", {})}, tmp_path / "out")
    code, text = invoke(RECIPE, "--output", str(tmp_path / "out"), "--verify")
    assert (code, "every file is what it was built as" in text) == (0, True)
    (tmp_path / "out" / "drafter" / "engine").write_bytes(bytes(99) + b"\1")
    code, text = invoke(RECIPE, "--output", str(tmp_path / "out"), "--verify")
    assert code == 1
    assert "sha256 differs" in text

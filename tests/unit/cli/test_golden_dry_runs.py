"""Three launches of real models by `serve --dry-run --show-files`; one is written down word for word, for each engine.

After a wanted change: GOLDEN=write pytest tests/unit/cli/test_golden_dry_runs.py, and read the difference. SGLang's and
vLLM's own parsers take the same commands in tests/contract.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from dflash_serve.cli.main import app
from tests.support.golden_deployments import FOLDER, NAMES, hub

__all__ = ["hub"]
ENGINES = ("sglang", "tensorrt-llm", "vllm")
WRITTEN_DOWN = "qwen3-8b-b200"
REFUSED = {("llama-8b-eight-copies-b200", engine) for engine in ("tensorrt-llm", "vllm")}
"""One server of theirs has one copy: the dry-run says so, and what to do."""


def dry_run(name: str, engine: str, *more: str) -> Result:
    words = ["serve", str(FOLDER / f"{name}.yaml"), "--backend", engine, "--dry-run", "--folder", "/prepared", *more]
    return CliRunner().invoke(app, words)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_tells_all_of_a_launch(name: str, engine: str) -> None:
    told = dry_run(name, engine, "--show-files")
    assert told.exit_code == (2 if (name, engine) in REFUSED else 0), told.output
    assert not Path("/prepared").exists(), "nothing is written"
    if name != WRITTEN_DOWN:
        return
    path, text = FOLDER / f"{name}.{engine}.txt", told.stdout.replace(sys.executable, "python")
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("engine", ENGINES)
def test_json_has_the_same_with_every_files_text(engine: str) -> None:
    told = json.loads(dry_run("qwen3-8b-b200", engine, "--json").stdout)
    assert told["problems"] == []
    assert told["backend"] == engine
    files = {file["name"]: file["text"] for file in told["files"]}
    assert json.loads(files["draft/config.json"])["block_size"] == 16
    assert files["draft/model.safetensors"] is None, "weights"
    chosen = {choice["key"]: choice for choice in told["chosen"]}
    assert chosen["limits.max_batch_size"]["value"] in ("48", "64", "256")
    assert chosen["limits.max_batch_size"]["why"]


@pytest.mark.usefixtures("hub")
def test_tensorrt_llms_config_is_shown_and_differs_by_width() -> None:
    texts = {}
    for width in ("8", "16", "off"):
        told = json.loads(dry_run("qwen3-8b-b200", "tensorrt-llm", "--json", "--width", width).stdout)
        texts[width] = next(file["text"] for file in told["files"] if file["name"] == "config.yaml")
    configured = {width: yaml.safe_load(text).get("speculative_config") for width, text in texts.items()}
    assert configured["8"]["max_draft_len"] == 7
    assert configured["16"]["max_draft_len"] == 15
    assert configured["off"] is None


@pytest.mark.usefixtures("hub")
def test_auto_on_tensorrt_llm_is_the_whole_block_whether_it_is_written_or_not() -> None:
    written, left_out = (
        dry_run("qwen3-8b-b200", "tensorrt-llm", "--width", "auto"),
        dry_run("qwen3-8b-b200", "tensorrt-llm"),
    )
    assert (written.exit_code, left_out.exit_code) == (0, 0)
    assert "verifies all 16 slots in every step, whatever that costs" in written.stdout
    given = "given on the command line or by environment variables\n  speculation.width = auto (command line)\n"
    assert written.stdout.replace(given, "") == left_out.stdout


@pytest.mark.usefixtures("hub")
def test_an_8b_model_on_eight_gpus_is_advised_to_be_copied_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVE_HARDWARE__COUNT", "8")
    told = dry_run("qwen3-8b-b200", "sglang").stdout
    assert "set parallel.data to 8 (15 GiB of weights leave room on a GPU: copies answer more)" in told

"""Drafts with which SGLang alone would start and accept nothing: with our plug-in they are refused, and named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paper_models import write_paper_drafter, write_paper_target
from tests.support.sglang_server import ENVIRONMENT, ON_CPU, PATIENCE


def renamed(folder: Path) -> Path:
    draft = write_paper_drafter(folder)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"fc.weight"', b'"fd.weight"'))
    return draft


BROKEN: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], str]] = {
    "renamed tensor": (renamed, (), "tensor fc.weight [64, 192] is missing"),
    "block too large": (
        write_paper_drafter,
        ("--speculative-num-draft-tokens", "16"),
        "block size 16 is larger than the draft's 8",
    ),
}


def arguments(folder: Path, draft: Path, *more: str) -> list[str]:
    target = write_paper_target(folder / "target")
    speculation = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    return ["--model-path", str(target), *speculation, *more, *ON_CPU]


def resolve(argv: list[str]) -> None:
    """As far as a server comes before it loads anything."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    prepare_server_args(argv).resolve_once()


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_draft_stops_sglangs_own_resolution(tmp_path: Path, fault: str) -> None:
    make, more, message = BROKEN[fault]
    with pytest.raises(ValueError, match="dflash-serve: ") as refused:
        resolve(arguments(tmp_path, make(tmp_path / "draft"), *more))
    assert message in str(refused.value)


IMPOSSIBLE: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "no width": ({"SPECULATION__WIDTH": "wide"}, (), "'wide' is neither a number of slots nor auto"),
    "no cost table": ({"SPECULATION__WIDTH": "auto", "COST_TABLE": "/nowhere.json"}, (), "no cost table"),
    "LoRA": ({"SPECULATION__WIDTH": "auto"}, ("--enable-lora", "--max-lora-rank", "8"), "made for one width"),
}


@pytest.mark.parametrize("fault", IMPOSSIBLE)
def test_a_width_that_cannot_be_honoured_stops_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    environment, more, message = IMPOSSIBLE[fault]
    for name, value in environment.items():
        monkeypatch.setenv(f"DFLASH_SERVE_{name}", value)
    with pytest.raises(ValueError, match="dflash-serve: ") as refused:
        resolve(arguments(tmp_path, write_paper_drafter(tmp_path / "draft"), *more))
    assert message in str(refused.value)


def test_the_server_ends_with_our_message_before_it_loads_anything(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sglang.launch_server", *arguments(tmp_path, renamed(tmp_path / "draft"))]
    env = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    log = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "dflash-serve: " in log
    assert "tensor fc.weight [64, 192] is missing" in log
    assert "Load weight begin" not in log


def test_beside_another_sglang_we_step_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even a draft that we would refuse is then SGLang's own business."""
    from dflash_sglang.plugin import before_resolution, before_worker

    monkeypatch.setattr("dflash_serve.adapter.facts.version", lambda _: "0.5.24")
    monkeypatch.setenv("DFLASH_SERVE_SPECULATION__WIDTH", "auto")
    asked: Any = SimpleNamespace(speculative_algorithm="DFLASH", speculative_draft_model_path=str(tmp_path))
    resolved: list[Any] = []
    before_resolution(resolved.append, asked)
    assert resolved == [asked]
    algorithm = SimpleNamespace(is_dflash=lambda: True)
    assert before_worker(lambda *_: int, algorithm, asked) is int
    assert "steps aside, and SGLang runs as it does without it: sglang: SGLang 0.5.24 is not supported" in caplog.text


def test_a_server_without_dflash_is_not_even_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    from dflash_sglang.plugin import before_resolution

    for asked in (SimpleNamespace(), SimpleNamespace(speculative_algorithm=None)):  # of whatever release
        before_resolution(lambda _: None, asked)
    assert caplog.text == ""

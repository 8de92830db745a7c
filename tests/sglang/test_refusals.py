"""Drafts with which SGLang alone would start and accept nothing: with our plug-in they are refused, and named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.reader import read_config
from tests.support.paper_models import write_paper_drafter, write_paper_target
from tests.support.sglang_server import ENVIRONMENT, ON_CPU, PATIENCE
from tests.support.tiny import edit_json, write_tiny_drafter


def renamed(folder: Path) -> Path:
    draft = write_paper_drafter(folder)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"fc.weight"', b'"fd.weight"'))
    return draft


def a_layer_short(folder: Path) -> Path:
    draft = write_paper_drafter(folder)
    edit_json(draft / "config.json", {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    return draft


def unconverted(folder: Path) -> Path:
    config, _ = read_config(write_paper_drafter(folder.with_name("source")))
    return write_tiny_drafter(folder, config, dialect="speculators")


BROKEN: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], str]] = {
    "renamed tensor": (renamed, (), "tensor fc.weight [64, 192] is missing"),
    "missing layer": (a_layer_short, (), "tensor layers.2.self_attn.q_proj.weight"),
    "speculators' dialect": (unconverted, (), "speculators' dialect, SGLang reads z-lab's"),
    "block too large": (
        write_paper_drafter,
        ("--speculative-num-draft-tokens", "16"),
        "block size 16 is larger than the draft's 8",
    ),
}


def arguments(folder: Path, draft: Path, algorithm: str, *more: str) -> list[str]:
    target = write_paper_target(folder / "target")
    speculation = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    return ["--model-path", str(target), *speculation, *more, *ON_CPU]


@pytest.mark.parametrize("algorithm", ["DFLASH", "DFLASH_SERVE"])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_draft_stops_sglangs_own_resolution(tmp_path: Path, fault: str, algorithm: str) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    make, more, message = BROKEN[fault]
    server_args = prepare_server_args(arguments(tmp_path, make(tmp_path / "draft"), algorithm, *more))
    with pytest.raises(ValueError, match="dflash-serve: ") as refused:
        server_args.resolve_once()
    assert message in str(refused.value)


def test_the_server_ends_with_our_message_before_it_loads_anything(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sglang.launch_server", *arguments(tmp_path, renamed(tmp_path / "draft"), "DFLASH")]
    env = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    log = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "dflash-serve: " in log
    assert "tensor fc.weight [64, 192] is missing" in log
    assert "Load weight begin" not in log


def test_weights_that_lack_a_tensor_are_refused_by_the_loader_itself(tmp_path: Path) -> None:
    """A draft class that we do not know to the last tensor is still loaded strictly."""
    import torch

    from dflash_sglang.plugin.guards import load_strictly

    class Loader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2, bias=False)

    with pytest.raises(ValueError, match=r"unknown tensors: fc\.weight_packed; missing: fc\.weight"):
        load_strictly(lambda _, given: list(given), Loader(), [("fc.weight_packed", torch.zeros(2, 2))])


def test_every_upstream_name_we_touch_is_there() -> None:
    from dflash_sglang.plugin import upstream

    assert list(upstream.upstream_problems([*upstream.OF_MAIN, *upstream.OF_SCHEDULER])) == []
    missing = list(upstream.upstream_problems(["sglang.srt.gone"]))
    assert "has no sglang.srt.gone, though 0.5.22-0.5.23 should" in str(missing[0])


@pytest.mark.parametrize("algorithm", ["DFLASH", "DFLASH_SERVE"])
def test_another_sglang_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    from dflash_sglang.plugin import before_resolution

    monkeypatch.setattr("dflash_sglang.plugin.upstream.installed_version", lambda: "0.5.24")
    monkeypatch.setattr("sglang.srt.arg_groups.overrides.resolving_view", lambda args: args)
    server_args: Any = type("Asked", (), {"speculative_algorithm": algorithm})()
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.24 is not supported, tested 0\.5\.22-0\.5\.23"):
        before_resolution(lambda _: None, server_args)

"""Drafters with which vLLM alone would start and accept little: by hand, without our checks, our plug-in stops them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.loading import given_checkpoint
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.source import BUNDLED_DRAFTER, target_folder
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.common.processes import run_command
from dflash_serve.errors import Problem, refuse
from dflash_vllm.launch import LAUNCHER
from tests.support.tiny import edit_json
from tests.support.vllm_faults import FAULTS, write_faulty
from tests.support.vllm_server import ENVIRONMENT

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def target() -> str:
    return str(target_folder("smollm2"))


@pytest.fixture
def configured(target: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """vLLM's own resolution of what `vllm serve` would be given by hand."""
    from vllm.engine.arg_utils import EngineArgs

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def configure(drafter: Path, drafted: int = 7, **more: object) -> Any:
        speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": drafted, **more}
        engine = EngineArgs(
            model=target, dtype="float32", max_model_len=1024, enforce_eager=True, speculative_config=speculative
        )
        return engine.create_engine_config()

    return configure


def problems(vllm_config: Any) -> list[Problem]:
    """Those of the drafter that vLLM was given."""
    from dflash_vllm.plugin.guards import draft_problems

    return draft_problems(vllm_config, given_checkpoint(vllm_config.speculative_config.draft_model_config.model, None))


def refusal(vllm_config: Any) -> str:
    with pytest.raises(ValueError, match="dflash-serve: ") as refused:
        refuse(problems(vllm_config))
    return str(refused.value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_drafter_is_refused_inside_vllm(name: str, tmp_path: Path, configured: Callable[..., Any]) -> None:
    assert FAULTS[name].says in refusal(configured(write_faulty(tmp_path / "drafter", FAULTS[name])))


def test_slots_beyond_the_block_are_refused(configured: Callable[..., Any]) -> None:
    """vLLM drafts them, pays for them and accepts next to none: 2.561 with K = 15."""
    assert "num_speculative_tokens 15 is more than block_size - 1 = 7" in refusal(configured(BUNDLED_DRAFTER, 15))


def test_an_acceptance_test_that_is_not_exact_is_refused(configured: Callable[..., Any]) -> None:
    lossy = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    assert "synthetic changes what the target would have said" in refusal(configured(BUNDLED_DRAFTER, **lossy))


def test_the_sound_drafter_is_not_refused(configured: Callable[..., Any]) -> None:
    assert problems(configured(BUNDLED_DRAFTER)) == []


def test_our_classes_stand_in_vllms_registry() -> None:
    from vllm.plugins import load_general_plugins

    from dflash_vllm.plugin import proof

    load_general_plugins()
    proof()


@pytest.mark.skipif(find_spec("vllm._C") is None, reason="this vLLM has no kernels (tests/support/vllm_python.py)")
def test_a_causal_speculators_export_ends_the_server_with_our_line(tmp_path: Path, target: str) -> None:
    """vLLM makes all of its layers causal: 2.278. Only the model that it built gives that away."""
    checkpoint = open_checkpoint(BUNDLED_DRAFTER)
    assert checkpoint.config is not None
    write_drafter(tmp_path / "drafter", checkpoint.config, load_tensors(checkpoint), dialect="speculators")
    edit_json(tmp_path / "drafter" / "config.json", {"sliding_window_non_causal": False})
    speculative = {"method": "dflash", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 7}
    argv = [sys.executable, "-m", LAUNCHER, "serve", target, "--dtype", "float32", "--max-model-len", "1024"]
    argv += ["--enforce-eager", "--port", "1", "--speculative-config", json.dumps(speculative)]
    assert run_command(argv, tmp_path / "log", env={**os.environ, **ENVIRONMENT}) != 0
    log = (tmp_path / "log").read_text()
    assert "its layers' (window, causal) are (None, False), vLLM reads (None, True)" in log
    assert "dflash-serve convert it --to zlab" in log

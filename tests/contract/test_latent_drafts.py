"""Drafters with latent attention (MLA): vLLM's own class loads what `prepare` writes, and SGLang has no class for them.

The published form, made tiny. vLLM 0.32 has the class, and 0.33's Python differs from it in one import; its attention
is for GPUs, so nothing is computed with it here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.launch import DRAFT
from dflash_serve.checkpoint.dialects.latent import ARCHITECTURE
from dflash_serve.deployment.description import Deployment
from dflash_sglang import SGLangBackend
from dflash_vllm import VLLMBackend
from tests.support.latent import BLOCK_SIZE, write_latent_drafter
from tests.support.tiny_target import write_tiny_target


def deployed(folder: Path) -> Deployment:
    target = write_tiny_target(folder / "target", family="qwen3", positions=512)
    write_latent_drafter(folder / "published", json.loads((target / "config.json").read_text())["vocab_size"])
    models = {"target": {"model": str(target)}, "drafter": {"model": str(folder / "published")}}
    return Deployment.model_validate({**models, "speculation": {"block_size": BLOCK_SIZE}})


@pytest.mark.skipif(find_spec("vllm") is None, reason="asked of vLLM")
def test_vllms_class_holds_the_numbers_of_the_prepared_and_of_the_published_folder(tmp_path: Path) -> None:
    launch = VLLMBackend().launch(deployed(tmp_path))
    assert launch.problems == []
    launch.prepare(tmp_path)
    for draft in (DRAFT, "published"):
        command = [sys.executable, "-m", "tests.support.vllm_latent", str(tmp_path / "target"), str(tmp_path / draft)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert (found["class"], found["others"]) == ("K3DSparkForCausalLM", [])
        assert [name for name, same in found["same"].items() if not same] == []
        assert found["rope"] == ["DeepseekScalingRotaryEmbedding", 8, False]
        assert found["scale"] == pytest.approx(24**-0.5 * found["mscale"] ** 2)


@pytest.mark.skipif(find_spec("sglang") is None, reason="asked of SGLang")
def test_sglang_has_no_class_of_them(tmp_path: Path) -> None:
    from sglang.srt.models.registry import ModelRegistry

    assert "Qwen3DSparkModel" in ModelRegistry.get_supported_archs()
    assert ARCHITECTURE not in ModelRegistry.get_supported_archs()
    problems = SGLangBackend().launch(deployed(tmp_path)).problems
    assert any("of which SGLang 0.5.23 has no class" in problem.what for problem in problems)

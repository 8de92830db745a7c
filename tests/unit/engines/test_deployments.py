"""After a build there is a Deployment to serve, and TensorRT-LLM's checks pass it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_engines.cli import write_deployments
from dflash_engines.pipeline import Source
from dflash_engines.recipe import Recipe
from dflash_serve.checkpoint.formats import Format
from dflash_serve.deployment import load_deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.upstream import Release
from tests.support.tiny import write_quantized_drafter


@pytest.mark.parametrize(
    ("format", "gpu", "fits"), [("fp8", "h200", True), ("nvfp4", "b200", True), ("nvfp4", "h200", False)]
)
def test_a_built_drafter_is_served_by_our_plug_in(format: Format, gpu: str, fits: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 96, "num_attention_heads": 4}
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes}
    (target / "config.json").write_text(json.dumps(raw))
    write_quantized_drafter(tmp_path / f"drafter-{format}", format)
    recipe = Recipe.model_validate({
        "deployment": {
            "target": {"model": "bundled"}, "drafter": {"model": "bundled"}, "limits": {"max_model_len": 128},
            "hardware": {"gpu": gpu},
        },
        "build": {"drafter": [format]},
    })  # fmt: skip
    (path,) = write_deployments(recipe, {"target": Source(target, "0", {})}, tmp_path)
    backend, deployment = TensorRTLLMBackend(Release.parse("1.4")), load_deployment(path)
    assert (backend.check(deployment) == []) is fits
    if fits:
        backend.prepare(deployment, tmp_path / "prepared")
        assert "--custom_module_dirs" in backend.command(deployment, tmp_path / "prepared").argv
        assert "quantization_config" in json.loads((tmp_path / "prepared" / "draft" / "config.json").read_text())

"""After a build there is a Deployment to serve, and TensorRT-LLM's checks pass it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_engines.recipe import Recipe, write_deployments
from dflash_engines.sources import Source
from dflash_serve.checkpoint.formats import Format, quantize
from dflash_serve.deployment import load_deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.upstream import Release
from tests.support.tiny import edit_json, random_tensors, tiny_drafter_config, write_tiny_drafter


def write_built(folder: Path, format: Format) -> None:
    """A quantised drafter, as the step `drafter-<format>` leaves it."""
    config = tiny_drafter_config(intermediate_size=64)
    write_tiny_drafter(folder, config, dtype=torch.bfloat16)
    state: dict[str, Tensor] = {}
    for name, tensor in random_tensors(config, dtype=torch.bfloat16).items():
        module = name.removesuffix(".weight")
        packed = module.endswith("_proj")
        state |= quantize(tensor, format, torch.tensor(0.1)).state(module) if packed else {name: tensor}
    save_file(state, folder / "model.safetensors")
    entry = {"quant_method": "modelopt", "quant_algo": format.upper(), "exclude_modules": ["fc"]}
    edit_json(folder / "config.json", {"quantization_config": entry})


@pytest.mark.parametrize(
    ("format", "gpu", "fits"), [("fp8", "h200", True), ("nvfp4", "b200", True), ("nvfp4", "h200", False)]
)
def test_a_built_drafter_is_served_by_our_plug_in(format: Format, gpu: str, fits: bool, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 96, "num_attention_heads": 4}
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes}
    (target / "config.json").write_text(json.dumps(raw))
    write_built(tmp_path / f"drafter-{format}", format)
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

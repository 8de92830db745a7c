"""What `prepare` writes is what TensorRT-LLM reads: a draft folder in z-lab's layout, config.yaml, and our package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from dflash_serve.checkpoint.quantization import Quantization, read_quantization
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.errors import UserError
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.upstream import Release
from tests.support.tiny import SLIDING, random_tensors, tiny_drafter_config, write_quantized_drafter
from tests.unit.tensorrt_llm.conftest import tiny_deployment

BACKEND = TensorRTLLMBackend(Release.parse("1.4"))


@pytest.mark.parametrize("dialect", ["zlab", "modelopt", "speculators"])
def test_any_dialect_becomes_a_folder_that_upstream_reads(dialect: str, tmp_path: Path) -> None:
    config = tiny_drafter_config()
    deployment = tiny_deployment(tmp_path, config, dialect)
    BACKEND.prepare(deployment, tmp_path / "out")
    draft = tmp_path / "out" / "draft"
    raw = json.loads((draft / "config.json").read_text())
    assert (raw["architectures"], raw["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert raw["block_size"] == 4
    assert raw["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]}
    assert read_config(draft) == (config, "zlab")
    assert load_file(draft / "model.safetensors").keys() == random_tensors(config).keys()
    written = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert written["speculative_config"]["speculative_model"] == str(draft)
    assert written["speculative_config"]["max_draft_len"] == 3


def test_a_prefixed_checkpoint_is_renamed(tmp_path: Path) -> None:
    config = tiny_drafter_config()
    deployment = tiny_deployment(tmp_path, config)
    path = tmp_path / "drafter" / "model.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in load_file(path).items()}, path)
    BACKEND.prepare(deployment, tmp_path / "out")
    assert load_file(tmp_path / "out" / "draft" / "model.safetensors").keys() == random_tensors(config).keys()


def test_a_prefixed_quantised_checkpoint_is_renamed_with_its_scales(tmp_path: Path) -> None:
    config = tiny_drafter_config(intermediate_size=64)
    deployment = tiny_deployment(tmp_path, config)
    shutil.rmtree(tmp_path / "drafter")
    path = write_quantized_drafter(tmp_path / "drafter", "fp8", config) / "model.safetensors"
    state = load_file(path)
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, path)
    BACKEND.prepare(deployment, tmp_path / "out")
    draft = tmp_path / "out" / "draft"
    written = load_file(draft / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name].float(), state[name].float()) for name in state)
    assert read_quantization(draft) == Quantization("fp8", ("fc",))


def test_a_plain_drafter_is_linked_and_needs_no_package(tmp_path: Path) -> None:
    deployment = tiny_deployment(tmp_path, tiny_drafter_config(layers=(SLIDING, SLIDING)))
    BACKEND.prepare(deployment, tmp_path / "out")
    assert (tmp_path / "out" / "draft" / "model.safetensors").is_symlink()
    command = BACKEND.command(deployment, tmp_path / "out")
    assert "--custom_module_dirs" not in command.argv
    assert command.env == {}


def test_an_odd_drafter_brings_our_package_and_tells_workers_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    deployment = tiny_deployment(tmp_path, tiny_drafter_config(target_layer_ids=(5, 1, 3)))
    BACKEND.prepare(deployment, tmp_path / "out")
    command = BACKEND.command(deployment, tmp_path / "out")
    package = Path(command.argv[command.argv.index("--custom_module_dirs") + 1])
    assert "register('Qwen3ForCausalLM', __name__)" in (package / "__init__.py").read_text()
    assert command.env == {"PYTHONPATH": f"{package.parent}:/elsewhere"}


def test_preparing_twice_is_preparing_once(tmp_path: Path) -> None:
    deployment = tiny_deployment(tmp_path, tiny_drafter_config())
    BACKEND.prepare(deployment, tmp_path / "out")
    first = sorted(path.name for path in (tmp_path / "out").iterdir())
    BACKEND.prepare(deployment, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == first


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    deployment = tiny_deployment(tmp_path, tiny_drafter_config())
    precious = tmp_path / "out" / "draft" / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(UserError, match="not written by us"):
        BACKEND.prepare(deployment, tmp_path / "out")
    assert precious.exists()


def test_problems_stop_it_before_anything_is_written(tmp_path: Path) -> None:
    deployment = tiny_deployment(tmp_path, tiny_drafter_config()).model_copy(update={"role": "decode"})
    with pytest.raises(UserError, match="never sees the prompt's features"):
        BACKEND.prepare(deployment, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_width_off_serves_the_target_alone(tmp_path: Path) -> None:
    deployment = tiny_deployment(tmp_path, tiny_drafter_config())
    speculation = deployment.speculation.model_copy(update={"width": "off"})
    BACKEND.prepare(deployment.model_copy(update={"speculation": speculation}), tmp_path / "out")
    assert "speculative_config" not in yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())

"""What `prepare` writes is what TensorRT-LLM reads: a draft folder in z-lab's layout, config.yaml, and our package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.checkpoint.formats import Format
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.tensors import Quantization, read_quantization
from dflash_serve.errors import UserError
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.plugin import BUILT
from dflash_tensorrt_llm.releases import Release
from tests.support.engine_readers import READERS
from tests.support.tiny import (
    FULL,
    SLIDING,
    SLIDING_BOTH_WAYS,
    random_tensors,
    tiny_drafter_config,
    write_quantized_drafter,
)
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
    assert "register('Qwen3ForCausalLM', __name__, 'ours')" in (package / "__init__.py").read_text()
    assert command.env == {"PYTHONPATH": f"{package.parent}:/elsewhere"}


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    deployment = tiny_deployment(tmp_path, tiny_drafter_config())
    precious = tmp_path / "out" / "draft" / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(UserError, match="not written by us"):
        BACKEND.prepare(deployment, tmp_path / "out")
    assert precious.exists()


@pytest.mark.parametrize("layers", [(SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS), (SLIDING_BOTH_WAYS, FULL)])
def test_windows_that_see_both_ways_are_said_in_upstreams_words(
    layers: tuple[AttentionKind, ...], tmp_path: Path
) -> None:
    """1.4's own drafter has them, so ours is not needed; read by its own rules they are what was meant."""
    config = tiny_drafter_config(layers=layers)
    deployment = tiny_deployment(tmp_path, config)
    BACKEND.prepare(deployment, tmp_path / "out")
    assert "--custom_module_dirs" not in BACKEND.command(deployment, tmp_path / "out").argv
    raw = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())
    assert READERS["tensorrt-llm"](raw).layers == layers


@pytest.mark.parametrize(("dtype", "written"), [("auto", None), ("bfloat16", None), ("fp8", "fp8")])
def test_keys_and_values_in_the_targets_own_type_are_not_named(dtype: str, written: str | None, tmp_path: Path) -> None:
    """Upstream takes auto, fp8 and nvfp4; `bfloat16` dies as the model is loaded."""
    deployment = tiny_deployment(tmp_path, tiny_drafter_config())
    kv_cache = deployment.kv_cache.model_copy(update={"dtype": dtype})
    BACKEND.prepare(deployment.model_copy(update={"kv_cache": kv_cache}), tmp_path / "out")
    text = (tmp_path / "out" / "config.yaml").read_text()
    assert yaml.safe_load(text)["kv_cache_config"].get("dtype") == written


@pytest.mark.parametrize(
    ("release", "gpu", "backend"),
    [
        ("1.3.0rc14", "b200", None), ("1.3.0rc24", "h200", None), ("1.3.0rc25", "b200", "TRTLLM"),
        ("1.3.0rc25", "h200", "VANILLA"), ("1.3.0rc27", "h200", "FA4"), ("1.4", "b300", "TRTLLM"),
    ],
)  # fmt: skip
def test_the_attention_follows_release_and_gpu(release: str, gpu: str, backend: str | None, tmp_path: Path) -> None:
    """Below #16914 the key itself is unknown, and every release of a year would refuse it."""
    deployment = tiny_deployment(tmp_path, tiny_drafter_config())
    hardware = deployment.hardware.model_copy(update={"gpu": gpu})
    TensorRTLLMBackend(Release.parse(release)).prepare(
        deployment.model_copy(update={"hardware": hardware}), tmp_path / "out"
    )
    written = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert written["speculative_config"].get("attention_backend") == backend


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_quantised_drafter_takes_upstreams_fast_path(format: Format, tmp_path: Path) -> None:
    """trtllm-gen's attention stays, and the dry-run says what of it is ours and how to see that it is."""
    config = tiny_drafter_config(intermediate_size=64)
    deployment = tiny_deployment(tmp_path, config)
    shutil.rmtree(tmp_path / "drafter")
    write_quantized_drafter(tmp_path / "drafter", format, config)
    deployment = deployment.model_copy(update={"hardware": deployment.hardware.model_copy(update={"gpu": "b200"})})
    BACKEND.prepare(deployment, tmp_path / "out")
    written = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert written["speculative_config"]["attention_backend"] == "TRTLLM"
    package = (tmp_path / "out" / "dflash_serve_drafter" / "__init__.py").read_text()
    assert "register('Qwen3ForCausalLM', __name__, 'dequantised context')" in package
    shown = BACKEND.preview(deployment, tmp_path / "out")
    assert {choice.key: choice.value for choice in shown.choices}["drafter implementation"] == (
        "TensorRT-LLM's own, with a context K/V of ours"
    )
    assert any(BUILT in note for note in shown.notes)

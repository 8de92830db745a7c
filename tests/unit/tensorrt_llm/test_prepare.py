"""`prepare` writes files as TensorRT-LLM reads them: a draft folder in z-lab's layout, config.yaml, and our package."""

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
from dflash_serve.checkpoint.quantization import Quantization, read_quantization
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.errors import UserError
from dflash_tensorrt_llm.plugin import BUILT
from tests.support.engine_readers import READERS
from tests.support.heads import HEADS
from tests.support.tiny import (
    FULL,
    SLIDING_BOTH_WAYS,
    edit_json,
    random_tensors,
    tiny_drafter_config,
    write_quantized_drafter,
    write_tiny_drafter,
)
from tests.unit.tensorrt_llm.conftest import backend, changed, configuration, tiny_deployment


def test_a_drafter_becomes_a_folder_that_upstream_reads(tmp_path: Path) -> None:
    config = tiny_drafter_config()
    deployment = tiny_deployment(tmp_path, config, "speculators")
    backend().launch(deployment).prepare(tmp_path / "out")
    draft = tmp_path / "out" / "draft"
    raw = json.loads((draft / "config.json").read_text())
    assert (raw["architectures"], raw["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert raw["block_size"] == 4
    assert raw["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]}
    written = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert written["speculative_config"]["speculative_model"] == str(draft)
    assert written["speculative_config"]["max_draft_len"] == 3
    command = backend().launch(deployment).command(tmp_path / "out")
    assert "--custom_module_dirs" not in command.argv
    assert command.env == {}


def test_a_prefixed_quantised_checkpoint_is_renamed_with_its_scales(tmp_path: Path) -> None:
    """TensorRT-LLM silently drops names that it does not know."""
    config = tiny_drafter_config(intermediate_size=64)
    deployment = tiny_deployment(tmp_path, config)
    shutil.rmtree(tmp_path / "drafter")
    path = write_quantized_drafter(tmp_path / "drafter", "fp8", config) / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file below replaces the mapped one
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, path)
    backend().launch(deployment).prepare(tmp_path / "out")
    draft = tmp_path / "out" / "draft"
    written = load_file(draft / "model.safetensors")
    assert written.keys() == state.keys()
    plain = {name: tensor.bfloat16() for name, tensor in state.items() if "norm" in name or name == "fc.weight"}
    assert all(torch.equal(written[name].float(), tensor.float()) for name, tensor in {**state, **plain}.items())
    assert read_quantization(draft) == Quantization("fp8", ("fc",))


def test_the_columns_of_fc_follow_the_order_in_which_features_are_captured(tmp_path: Path) -> None:
    config = tiny_drafter_config(target_layer_ids=(5, 1, 3))
    deployment = tiny_deployment(tmp_path, config)
    backend().launch(deployment).prepare(tmp_path / "out")
    assert "--custom_module_dirs" not in backend().launch(deployment).command(tmp_path / "out").argv
    assert configuration(deployment)["speculative_config"]["target_layer_ids"] == [1, 3, 5]
    draft = tmp_path / "out" / "draft"
    assert read_config(draft)[0] == config.model_copy(update={"target_layer_ids": (1, 3, 5)})
    before, after = random_tensors(config, dtype=torch.bfloat16), load_file(draft / "model.safetensors")
    features = dict(zip(config.target_layer_ids, torch.randn(3, 8, config.hidden_size), strict=True))
    torch.testing.assert_close(
        torch.cat([features[layer] for layer in (1, 3, 5)], dim=1) @ after.pop("fc.weight").float().T,
        torch.cat([features[layer] for layer in (5, 1, 3)], dim=1) @ before.pop("fc.weight").float().T,
    )
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("stored", "target", "written"),
    [
        (torch.float32, None, "bfloat16"),
        (torch.float16, "bfloat16", "bfloat16"),
        (torch.bfloat16, "float16", "float16"),
    ],
)
def test_a_drafter_takes_the_number_format_of_its_target(
    stored: torch.dtype, target: str | None, written: str, tmp_path: Path
) -> None:
    """It reads the target's embeddings, its context is kept in the type of `fc`, and flash-attn takes 16 bits."""
    config = tiny_drafter_config()
    deployment = tiny_deployment(tmp_path, config)
    edit_json(tmp_path / "target" / "config.json", {"dtype": target})
    shutil.rmtree(tmp_path / "drafter")
    write_tiny_drafter(tmp_path / "drafter", config, dtype=stored)
    backend().launch(deployment).prepare(tmp_path / "out")
    draft = tmp_path / "out" / "draft"
    assert {tensor.dtype for tensor in load_file(draft / "model.safetensors").values()} == {getattr(torch, written)}
    assert json.loads((draft / "config.json").read_text())["dtype"] == written


def test_an_odd_drafter_brings_our_package_and_tells_workers_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    deployment = tiny_deployment(tmp_path, tiny_drafter_config(embedding_scale=2.0))
    backend().launch(deployment).prepare(tmp_path / "out")
    command = backend().launch(deployment).command(tmp_path / "out")
    package = Path(command.argv[command.argv.index("--custom_module_dirs") + 1])
    assert "register('Qwen3ForCausalLM', __name__, 'ours')" in (package / "__init__.py").read_text()
    assert command.env == {"PYTHONPATH": f"{package.parent}:/elsewhere"}


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    deployment = tiny_deployment(tmp_path, tiny_drafter_config())
    precious = tmp_path / "out" / "draft" / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(UserError, match="not written by us"):
        backend().launch(deployment).prepare(tmp_path / "out")
    assert precious.exists()


@pytest.mark.parametrize("layers", [(SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS), (SLIDING_BOTH_WAYS, FULL)])
def test_windows_that_see_both_ways_are_said_in_upstreams_words(
    layers: tuple[AttentionKind, ...], tmp_path: Path
) -> None:
    """1.4's own drafter has them, so ours is not needed; by its own rules it reads the layers that were meant."""
    deployment = tiny_deployment(tmp_path, tiny_drafter_config(layers=layers))
    backend().launch(deployment).prepare(tmp_path / "out")
    assert "--custom_module_dirs" not in backend().launch(deployment).command(tmp_path / "out").argv
    raw = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())
    assert READERS["tensorrt-llm"](raw).layers == layers


@pytest.mark.parametrize(
    ("heads", "kernels"),
    [
        ("anchor-first", "TRTLLM"), ("vanilla Markov", "TRTLLM"), ("vanilla Markov, fill-in", "TRTLLM"),
        ("Markov and confidence", "TRTLLM"), ("DFlash2", "VANILLA"),
    ],
)  # fmt: skip
def test_drafters_with_heads_are_said_in_upstreams_words(heads: str, kernels: str, tmp_path: Path) -> None:
    """Upstream's rules: `resolve_dspark_head_config` and `is_causal` of DFlash2, both modeling_dflash.py."""
    layers = (SLIDING_BOTH_WAYS,) * 2 if heads == "DFlash2" else (FULL, FULL)
    config = tiny_drafter_config(layers=layers, **HEADS[heads], target_layer_ids=(5, 1, 3))
    deployment = changed(tiny_deployment(tmp_path, config), hardware={"gpu": "b200"})
    backend().launch(deployment).prepare(tmp_path / "out")
    draft = tmp_path / "out" / "draft"
    raw, stored = json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")
    written = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["speculative_config"]
    dspark, dflash = heads != "DFlash2", raw["dflash_config"]
    assert (written["decoding_type"], written["attention_backend"]) == ("DSpark" if dspark else "DFlash", kernels)
    assert written["max_draft_len"] == 3 == written.get("block_size", 3)
    assert written["target_layer_ids"] == dflash["target_layer_ids"] == [1, 3, 5], "upstream compares the two"
    assert read_config(draft)[0] == config.model_copy(update={"target_layer_ids": (1, 3, 5)})
    assert stored.keys() == random_tensors(config).keys()
    assert "shift_label" in dflash if dspark else raw["use_sliding_window"] and raw["is_causal"] is False
    if dspark:
        assert dflash["shift_label"] == (config.slots == "anchor-first")
        assert (raw["block_size"], raw["markov_rank"]) == (config.rows(), config.markov.rank if config.markov else 0)
        assert "causal" not in raw.keys() | dflash.keys(), "upstream refuses the key"


@pytest.mark.parametrize(("dtype", "written"), [("auto", None), ("bfloat16", None), ("fp8", "fp8")])
def test_keys_and_values_in_the_targets_own_type_are_not_named(dtype: str, written: str | None, tmp_path: Path) -> None:
    """Upstream takes auto, fp8 and nvfp4; `bfloat16` dies as the model is loaded."""
    deployment = changed(tiny_deployment(tmp_path, tiny_drafter_config()), kv_cache={"dtype": dtype})
    assert configuration(deployment)["kv_cache_config"].get("dtype") == written


@pytest.mark.parametrize(
    ("release", "gpu", "kernels"),
    [
        ("1.3.0rc22", "b200", None), ("1.3.0rc24", "h200", None), ("1.3.0rc25", "b200", "TRTLLM"),
        ("1.3.0rc25", "h200", "VANILLA"), ("1.3.0rc27", "h200", "FA4"), ("1.4", "b300", "TRTLLM"),
    ],
)  # fmt: skip
def test_the_attention_follows_release_and_gpu(release: str, gpu: str, kernels: str | None, tmp_path: Path) -> None:
    """Before #16914 the key itself is unknown, and every release would refuse it. TRTLLM alone needs no package."""
    deployment = changed(tiny_deployment(tmp_path, tiny_drafter_config()), hardware={"gpu": gpu})
    notes = " ".join(backend(release).launch(deployment).notes)
    assert ("package flash-attn beside" in notes) == (kernels in (None, "VANILLA"))
    assert ("package flash-attn-4 (flash_attn.cute) beside" in notes) == (kernels == "FA4")
    assert configuration(deployment, release)["speculative_config"].get("attention_backend") == kernels


def test_heads_for_which_trtllm_gen_has_no_kernels_are_flash_attns(tmp_path: Path) -> None:
    """trtllm-gen has 72, 80 and 96 for causal attention alone (flashinfer_trtllm_gen)."""
    deployment = changed(tiny_deployment(tmp_path, tiny_drafter_config(head_dim=80)), hardware={"gpu": "b200"})
    assert configuration(deployment)["speculative_config"]["attention_backend"] == "VANILLA"


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_quantised_drafter_takes_upstreams_fast_path(format: Format, tmp_path: Path) -> None:
    """trtllm-gen's attention stays, and the dry run says which part is ours and how to see that it is loaded."""
    config = tiny_drafter_config(intermediate_size=64)
    deployment = changed(tiny_deployment(tmp_path, config), hardware={"gpu": "b200"})
    shutil.rmtree(tmp_path / "drafter")
    write_quantized_drafter(tmp_path / "drafter", format, config)
    assert configuration(deployment)["speculative_config"]["attention_backend"] == "TRTLLM"
    backend().launch(deployment).prepare(tmp_path / "out")
    package = (tmp_path / "out" / "dflash_serve_drafter" / "__init__.py").read_text()
    assert "register('Qwen3ForCausalLM', __name__, 'dequantised context')" in package
    shown = backend().launch(deployment)
    assert {choice.key: choice.value for choice in shown.choices}["drafter implementation"] == (
        "TensorRT-LLM's own, with a context K/V of ours"
    )
    assert any(BUILT in note for note in shown.notes)

"""What the vLLM backend finds wrong with a Deployment before anything starts; no vLLM and no GPU needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.deployment import COST_TABLE, SURVIVAL, Deployment
from dflash_vllm import VLLMBackend
from dflash_vllm.checks import PLUG_INS_VARIABLE
from dflash_vllm.drafter_rules import V1_VARIABLE
from tests.support.paper_models import NVFP4, write_paper_drafter, write_paper_target
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, edit_json


def deploy(target: Path, drafter: Path, **changes: Any) -> Deployment:
    fields: dict[str, Any] = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    for path, value in changes.items():
        room, _, field = path.partition("__")
        if field:
            fields.setdefault(room, {})[field] = value
        else:
            fields[room] = value
    return Deployment.model_validate(fields)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_paper_drafter(tmp_path / "drafter")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_paper_target(tmp_path / "target")


def whats(deployment: Deployment) -> str:
    found = VLLMBackend().check(deployment)
    assert all(problem.what and problem.where and problem.do for problem in found)
    return "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation__draft_window": 64}, "no window for drafters that were trained without one"),
        ({"parallel__context": 2}, "context parallelism"),
        ({"parallel__nodes": 2, "parallel__tensor": 2, "hardware__count": 2}, "several nodes"),
        ({"parallel__attention_data": True}, "cannot agree on a width, and it drops the schedule"),
        ({"parallel__tensor": 3, "hardware__count": 3}, "16 attention heads cannot be split over 3 devices"),
        ({"parallel__data": 2, "hardware__count": 2}, "`dflash-serve deploy` makes 2 replicas of it"),
        ({"drafter__quantization": "fp8"}, "quantised drafters are not covered"),
        ({"kv_cache__dtype": "nvfp4"}, "NVFP4 keys and values are not covered"),
        ({"kv_cache__memory_fraction": 0.5}, "not of which GPU"),
        ({"limits__max_num_tokens": 64}, "256 blocks of 8 slots are 2048 rows a step, max_num_tokens is 64"),
        ({"role": "decode"}, "role decode is not covered"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(
    target: Path, drafter: Path, change: dict[str, Any], message: str
) -> None:
    assert message in whats(deploy(target, drafter, **change))


SILENT: dict[str, tuple[dict[str, object], str]] = {
    "mask token beyond the vocabulary": ({"dflash_config.mask_token_id": 96}, "mask_token_id 96 is outside"),
    "layer beyond the target": ({"dflash_config.target_layer_ids": [1, 3, 9], "num_target_layers": None}, "name [9]"),
    "layers not in order": ({"dflash_config.target_layer_ids": [3, 1, 5]}, "not in order"),
    "a layer twice": ({"dflash_config.target_layer_ids": [1, 3, 3]}, "name a layer twice"),
    "more layers than tensors": (
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "tensor layers.2."),
    "fewer layers than tensors": ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "tensor layers.1."),
    "RoPE table shorter than the context": ({"max_position_embeddings": 128}, "RoPE table has 128 positions"),
    "another vocabulary": ({"vocab_size": 90}, "vocab_size is 90, the target's is 96"),
    "an embedding scale": ({"input_embedding_scale": 8.0}, "which vLLM ignores"),
    "a shifted head": ({"dflash_config.shift_label": True}, "keep the right one"),
    "another head": ({"dflash_config.projector_type": "domino"}, "Domino head"),
    "an unknown key": ({"dflash_config.temperature_head": 1}, "unknown key dflash_config.temperature_head"),
    "two sayings of causality": ({"dflash_config.causal": True}, "is_causal is False"),
}  # fmt: skip
"""Edits of config.json with which vLLM comes up healthy (facts measured on 0.32: tests/vllm/test_faults.py)."""


@pytest.mark.parametrize("fault", SILENT)
def test_what_vllm_would_swallow_is_refused_before_launch(target: Path, drafter: Path, fault: str) -> None:
    change, message = SILENT[fault]
    edit_json(drafter / "config.json", change)
    assert message in whats(deploy(target, drafter))


@pytest.mark.parametrize("tensor", ["fc.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_found_before_launch(target: Path, drafter: Path, tensor: str) -> None:
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(f'"{tensor}"'.encode(), f'"{tensor[:-1]}x"'.encode()))
    assert f"tensor {tensor}" in whats(deploy(target, drafter))


@pytest.mark.parametrize("layers", [(FULL, SLIDING), (FULL, SLIDING_BOTH_WAYS)])
@pytest.mark.parametrize("gpu", ["none", "b200"])
def test_mixed_windows_need_the_second_model_runner(
    tmp_path: Path, target: Path, layers: tuple[AttentionKind, ...], gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = write_paper_drafter(tmp_path / "mixed", layers=layers)
    if layers[1].causal or gpu == "none":
        assert ("V1 model runner" in whats(deploy(target, mixed, hardware__gpu=gpu))) is (gpu == "none")
    monkeypatch.setenv(V1_VARIABLE, "0")
    assert "V1 model runner" in whats(deploy(target, mixed, hardware__gpu=gpu))


def test_an_environment_that_leaves_our_plug_in_out_is_refused(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUG_INS_VARIABLE, "lora_filesystem_resolver")
    assert "leaves dflash_serve out" in whats(deploy(target, drafter))
    assert whats(deploy(target, drafter, speculation__width="off")) == ""
    monkeypatch.setenv(PLUG_INS_VARIABLE, "other,dflash_serve")
    assert whats(deploy(target, drafter)) == ""


@pytest.mark.parametrize(("variable", "value", "message"), [
    (COST_TABLE, "/nowhere.json", "no cost table"), (SURVIVAL, "0.2,0.4", "is no survival"),
])  # fmt: skip
def test_costs_and_survivals_that_are_none_are_found_before_launch(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert message in str(VLLMBackend().check(deploy(target, drafter))[0])


def test_nvfp4_on_hopper_is_found(tmp_path: Path, drafter: Path) -> None:
    target = write_paper_target(tmp_path / "fp4", recipe=NVFP4)
    assert "h100 has no FP4 arithmetic" in whats(deploy(target, drafter, hardware__gpu="h100"))


def test_a_target_that_scales_its_embedding_is_refused_for_vllm_would_draft_without_the_scale(
    tmp_path: Path, drafter: Path
) -> None:
    target = write_paper_target(tmp_path / "gemma", model_type="gemma4")
    assert "gemma4 scales its embedding, and vLLM hands it to DFlash drafters unscaled" in whats(
        deploy(target, drafter)
    )
    assert whats(deploy(target, drafter, speculation__width="off")) == ""

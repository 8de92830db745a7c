"""What the SGLang backend finds wrong with a Deployment before anything starts; no SGLang and no GPU needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.formats import Format
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.deployment import Deployment
from dflash_sglang import SGLangBackend
from tests.support.paper_models import NVFP4, PAPER_DRAFTER, write_paper_drafter, write_paper_target
from tests.support.tiny import edit_json, tiny_drafter_config, write_quantized_drafter

LARGE: dict[str, Any] = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256,
    "num_attention_heads": 64, "head_dim": 128,
}  # fmt: skip


def deploy(target: Path, drafter: Path, **changes: Any) -> Deployment:
    fields: dict[str, Any] = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    for path, value in changes.items():
        room, field = path.split("__")
        fields.setdefault(room, {})[field] = value
    return Deployment.model_validate(fields)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_paper_drafter(tmp_path / "drafter")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_paper_target(tmp_path / "target")


def whats(deployment: Deployment) -> str:
    found = SGLangBackend().check(deployment)
    assert all(problem.what and problem.where and problem.do for problem in found)
    return "\n".join(map(str, found))


def test_a_sound_deployment_has_no_problems(target: Path, drafter: Path) -> None:
    assert SGLangBackend().check(deploy(target, drafter)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation__block_size": 16}, "block_size 16 is larger than the drafter's 8"),
        ({"speculation__width": 9}, "width 9 is larger than the block of 8 slots"),
        ({"speculation__draft_window": 4}, "draft_window 4 is smaller than the block of 8 slots"),
        ({"parallel__pipeline": 2}, "does not run with pipeline parallelism"),
        ({"parallel__context": 2}, "context parallelism"),
        ({"parallel__tensor": 3, "hardware__count": 3}, "16 attention heads cannot be split over 3 devices"),
        ({"parallel__tensor": 2}, "hardware.count is 1"),
        ({"parallel__tensor": 8, "hardware__count": 8, "parallel__nodes": 3}, "8 devices cannot be shared evenly"),
        ({"parallel__expert": 2}, "the target has no experts"),
        ({"hardware__gpu": "none"}, "runs on GPUs"),
        ({"hardware__dtype": "float32"}, "bfloat16 only"),
        ({"drafter__quantization": "fp8"}, "drafts are not quantised"),
        ({"target__quantization": "nvfp4"}, "the checkpoint is not quantised"),
        ({"kv_cache__dtype": "nvfp4", "hardware__gpu": "b200"}, "refuses DFlash on NVFP4 keys and values"),
        ({"kv_cache__dtype": "nvfp4", "hardware__gpu": "h200"}, "h200 has no FP4"),
        ({"limits__max_model_len": 4096}, "4096 is more than the target's 256 positions"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(
    target: Path, drafter: Path, change: dict[str, Any], message: str
) -> None:
    assert message in whats(deploy(target, drafter, **change))


DATA_PARALLEL = {"parallel__attention_data": True, "parallel__tensor": 8, "hardware__count": 8}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "change", "part"),
    [({}, DATA_PARALLEL, "data-parallel attention"), (RECURRENT, {}, "recurrent layers in the target")],
)
def test_auto_verifies_whole_blocks_where_no_other_width_is_served(
    target: Path, drafter: Path, config: dict[str, Any], change: dict[str, Any], part: str
) -> None:
    edit_json(target / "config.json", config)
    automatic = deploy(target, drafter, **change)
    assert whats(automatic) == ""
    shown = SGLangBackend().preview(automatic, target.parent / "prepared")
    assert f"SGLang verifies whole blocks of 8 slots with {part}: auto changes nothing" in shown.notes
    assert ("speculation.width", "8") in [(choice.key, choice.value) for choice in shown.choices]
    assert whats(deploy(target, drafter, **change, speculation__width=8)) == ""
    found = whats(deploy(target, drafter, **change, speculation__width=3))
    assert f"SGLang verifies whole blocks of 8 slots with {part}, not 3" in found


def test_experts_are_shared_by_all_devices_or_none(tmp_path: Path, drafter: Path) -> None:
    target = write_paper_target(tmp_path / "experts", experts=16)
    wide = {"parallel__tensor": 8, "hardware__count": 8}
    assert whats(deploy(target, drafter, **wide, parallel__expert=8)) == ""
    assert "SGLang shares experts among all" in whats(deploy(target, drafter, **wide, parallel__expert=4))


def test_nvfp4_on_hopper_and_a_quantised_head_are_found(tmp_path: Path, drafter: Path) -> None:
    target = write_paper_target(tmp_path / "fp4", recipe={**NVFP4, "ignore": []})
    found = whats(deploy(target, drafter, hardware__gpu="h100"))
    assert "h100 has no FP4 arithmetic" in found
    assert "lm_head is quantised" in found


def test_a_drafter_of_another_target_is_found(tmp_path: Path, target: Path) -> None:
    other = write_paper_drafter(tmp_path / "other", vocab_size=128, target_layer_ids=(1, 3, 9), num_target_layers=10)
    found = whats(deploy(target, other))
    assert "vocab_size is 128, the target's is 96" in found
    assert "target_layer_ids [1, 3, 9] name [9]" in found


def test_a_renamed_tensor_is_found_before_launch(target: Path, drafter: Path) -> None:
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"fc.weight"', b'"fd.weight"'))
    found = whats(deploy(target, drafter))
    assert "tensor fc.weight [64, 192] is missing" in found
    assert "tensor fd.weight" in found


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_quantised_drafter_is_found(target: Path, tmp_path: Path, format: Format) -> None:
    quantised = write_quantized_drafter(tmp_path / "quantised", format, tiny_drafter_config(**PAPER_DRAFTER))
    (problem,) = SGLangBackend().check(deploy(target, quantised))
    assert f"quantised to {format.upper()}, SGLang reads bf16 drafters only" in str(problem)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"causal": True}, {"window": 8}], "some layers are causal and others not"),
        ([{"window": 8, "causal": True}, {"window": 16, "causal": True}], "different windows (8, 16)"),
        ([{"window": 8, "causal": True}, {}], ""),
        ([{"window": 8}, {"window": 8}], ""),
    ],
)
def test_attention_that_sglang_cannot_be_told_of_is_found(
    target: Path, tmp_path: Path, layers: list[dict[str, Any]], message: str
) -> None:
    drafter = tmp_path / "windowed"
    config = tiny_drafter_config(**{**PAPER_DRAFTER, "layers": layers})
    with pytest.MonkeyPatch.context() as patch:  # no dialect has words for it: the plan is made as if one had
        patch.setattr("dflash_serve.server_adapter.open_checkpoint", lambda *_: Checkpoint(drafter, config=config))
        assert message in whats(deploy(target, drafter))
        assert bool(whats(deploy(target, drafter))) == bool(message)


def test_a_drafter_beyond_its_positions_is_found(target: Path, tmp_path: Path) -> None:
    short = write_paper_drafter(tmp_path / "short", max_position_embeddings=128)
    assert "its RoPE was made for 128 positions" in whats(deploy(target, short))
    assert whats(deploy(target, short, limits__max_model_len=128)) == ""


def test_a_target_that_hands_out_no_features_is_found(target: Path, drafter: Path) -> None:
    edit_json(target / "config.json", {"model_type": "mamba2"})
    assert "does not hand out hidden states" in whats(deploy(target, drafter))


def test_without_speculation_the_drafter_does_not_matter(target: Path, tmp_path: Path) -> None:
    assert whats(deploy(target, tmp_path, speculation__width="off")) == ""


def test_a_target_too_large_for_its_devices_is_found(tmp_path: Path, drafter: Path) -> None:
    target = write_paper_target(tmp_path / "large", **LARGE)
    found = whats(deploy(target, drafter, hardware__gpu="h100", speculation__width="off"))
    assert "one device needs 131" in found
    wide = {"parallel__tensor": 4, "hardware__count": 4, "speculation__width": "off"}
    assert whats(deploy(target, drafter, hardware__gpu="h100", **wide)) == ""


def test_a_context_that_leaves_no_room_is_found(tmp_path: Path, drafter: Path) -> None:
    target = write_paper_target(tmp_path / "long", **{**LARGE, "max_position_embeddings": 1_000_000})
    four = {"parallel__tensor": 4, "hardware__count": 4, "speculation__width": "off"}
    found = whats(deploy(target, drafter, hardware__gpu="h100", **four))
    assert "1000000 tokens, but after the weights there is room" in found


@pytest.mark.parametrize(
    ("version", "fits"), [("0.5.22", False), ("0.5.23", True), ("0.5.23.post1", True), ("0.6.0", False)]
)
def test_only_tested_versions_pass(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    monkeypatch.setattr("dflash_serve.backend.version", lambda _: version)
    found = whats(deploy(target, drafter))
    assert (f"SGLang {version} is not supported, tested 0.5.23" in found) is not fits

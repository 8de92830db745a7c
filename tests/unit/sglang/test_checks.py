"""What the SGLang backend finds wrong with a Deployment before anything starts; no SGLang and no GPU needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.deployment import Deployment
from dflash_sglang import SGLangBackend
from tests.support.paper_models import NVFP4, PAPER_DRAFTER, write_paper_drafter, write_paper_target
from tests.support.tiny import edit_json, tiny_drafter_config


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation__draft_window": 4}, "draft_window 4 is smaller than the block of 8 slots"),
        ({"parallel__context": 2}, "context parallelism"),
        ({"parallel__tensor": 3, "hardware__count": 3}, "16 attention heads cannot be split over 3 devices"),
        ({"parallel__tensor": 8, "hardware__count": 8, "parallel__nodes": 3}, "8 devices cannot be shared evenly"),
        ({"hardware__gpu": "none"}, "runs on GPUs"),
        ({"drafter__quantization": "fp8"}, "drafts are not quantised"),
        ({"kv_cache__dtype": "nvfp4", "hardware__gpu": "b200"}, "refuses DFlash on NVFP4 keys and values"),
        ({"kv_cache__dtype": "nvfp4", "hardware__gpu": "h200"}, "h200 has no FP4"),
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


def test_nvfp4_on_hopper_and_a_quantised_head_are_found(tmp_path: Path, drafter: Path) -> None:
    target = write_paper_target(tmp_path / "fp4", recipe={**NVFP4, "ignore": []})
    found = whats(deploy(target, drafter, hardware__gpu="h100"))
    assert "h100 has no FP4 arithmetic" in found
    assert "lm_head is quantised" in found


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

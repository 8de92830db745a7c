"""What every engine's adapter asks first: does the drafter fill such blocks, and are built files what was built?"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import block_problems, changed_files
from tests.support.built import flip_last_byte, seal
from tests.support.paper_models import write_paper_drafter, write_paper_target
from tests.support.tiny import tiny_drafter_config


@pytest.fixture
def built(tmp_path: Path) -> Deployment:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    models = {"target": {"model": str(seal(target))}, "drafter": {"model": str(seal(drafter))}}
    return Deployment.model_validate({**models, "hardware": {"gpu": "h200"}})


def test_a_drafter_that_is_not_used_is_not_read(built: Deployment, tmp_path: Path) -> None:
    flip_last_byte(tmp_path / "drafter" / "model.safetensors")
    assert len(changed_files(built)) == 1
    plain = Deployment.model_validate({**built.model_dump(), "speculation": {"width": "off"}})
    assert changed_files(plain) == []


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({}, ""),
        ({"block_size": 4, "width": 4}, ""),
        ({"block_size": 8}, "block_size 8 is larger than the drafter's 4"),
        ({"width": 5}, "width 5 is larger than the block of 4 slots"),
        ({"block_size": 2, "width": 3}, "width 3 is larger than the block of 2 slots"),
    ],
)
def test_no_block_or_width_beyond_the_drafter(speculation: dict[str, int], message: str) -> None:
    deployment = Deployment.model_validate({"target": {"model": "t"}, "speculation": speculation})
    found = [problem.what for problem in block_problems(deployment, tiny_drafter_config())]
    assert found == ([message] if message else [])

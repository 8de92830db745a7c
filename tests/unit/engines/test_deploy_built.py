"""A drafter that `dflash-serve build` has quantised is deployed like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.checkpoint.formats import Format
from dflash_serve.cli.main import app
from tests.support.built import seal
from tests.support.tiny import tiny_drafter_config, write_quantized_drafter
from tests.support.tiny_target import SPECIALS, write_tiny_target


@pytest.fixture(scope="module", params=["fp8", "nvfp4"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment with a drafter as a build leaves it."""
    format: Format = request.param
    folder = tmp_path_factory.mktemp("built")
    target = write_tiny_target(folder / "target")
    config = tiny_drafter_config(
        block_size=4,
        num_target_layers=4,
        target_layer_ids=(0, 2),
        mask_token_id=SPECIALS.index("<mask>"),
        vocab_size=json.loads((target / "config.json").read_text())["vocab_size"],
        max_position_embeddings=256,
        intermediate_size=64,
    )
    drafter = seal(write_quantized_drafter(folder / f"drafter-{format}", format, config))
    path = folder / "deployment.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "target": {"model": str(target)},
                "drafter": {"model": str(drafter), "quantization": format},
                "hardware": {"gpu": "b200"},
            }
        )
    )
    return path


@pytest.mark.parametrize("form", ["helm", "compose", "kserve"])
def test_a_quantised_drafter_is_rendered(file: Path, form: str) -> None:
    image = f"x/y@sha256:{64 * '0'}"
    words = ["deploy", str(file), "--backend", "tensorrt-llm", "--render", form, "--image", image]
    result = CliRunner().invoke(app, words)
    assert result.exception is None, result.exception
    assert f"drafter-{file.read_text().split('quantization: ')[1].split()[0]}" in result.stdout

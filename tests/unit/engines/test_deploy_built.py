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
    return deployment(tmp_path_factory.mktemp("built"), request.param)


def deployment(folder: Path, format: Format, *, fused: bool = True) -> Path:
    """The file of a deployment with a quantised drafter; `fused` as for `quantized_state`."""
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
    drafter = seal(write_quantized_drafter(folder / f"drafter-{format}", format, config, fused=fused))
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


def test_a_quantised_drafter_is_rendered(file: Path) -> None:
    image = f"x/y@sha256:{64 * '0'}"
    words = ["deploy", str(file), "--backend", "tensorrt-llm", "--render", "helm", "--image", image]
    result = CliRunner().invoke(app, words)
    assert result.exception is None, result.exception
    assert f"drafter-{file.read_text().split('quantization: ')[1].split()[0]}" in result.stdout


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
@pytest.mark.parametrize("backend", ["tensorrt-llm", "sglang", "vllm"])
def test_a_drafter_that_0_1_0_built_is_refused_with_the_step_to_rebuild(
    backend: str, format: Format, tmp_path: Path
) -> None:
    """Its q/k/v and gate/up have scales of their own."""
    file = deployment(tmp_path, format, fused=False)
    result = CliRunner().invoke(app, ["serve", str(file), "--backend", backend, "--dry-run"])
    assert result.exit_code != 0
    said = " ".join((result.output + str(result.exception)).split())
    assert "gate_proj, up_proj of layers.0.mlp do not share their scales, nor do 3 other groups" in said
    assert "build it again with `dflash-serve build`" in said

"""A drafter that `dflash-serve build` has quantised is served and deployed like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_engines.cli import write_deployments
from dflash_engines.pipeline import Source
from dflash_engines.recipe import BuildRecipe
from dflash_serve.adapter.registry import server_backend
from dflash_serve.checkpoint.formats import Format
from dflash_serve.cli.main import app
from dflash_serve.deployment.layers import load_deployment
from dflash_tensorrt_llm import backend
from tests.support.built import seal
from tests.support.tiny import edit_json, tiny_drafter_config, write_quantized_drafter
from tests.support.tiny_target import SPECIALS, write_tiny_target
from tests.unit.tensorrt_llm.conftest import changed, tiny_deployment

README = Path(__file__).parents[3] / "engines" / "README.md"
FORMATS: list[Format] = ["fp8", "nvfp4"]


def built(folder: Path, format: Format, *, gpu: str = "b200", fused: bool = True) -> Path:
    """The deployment that a build writes beside its drafter; `fused` as for `quantized_state`."""
    target = write_tiny_target(folder / "target")
    config = tiny_drafter_config(
        num_target_layers=4,
        target_layer_ids=(0, 2),
        mask_token_id=SPECIALS.index("<mask>"),
        vocab_size=json.loads((target / "config.json").read_text())["vocab_size"],
        intermediate_size=64,
    )
    seal(write_quantized_drafter(folder / f"drafter-{format}", format, config, fused=fused))
    deployment = {"target": {"model": "bundled"}, "drafter": {"model": "bundled"}, "hardware": {"gpu": gpu}}
    recipe = BuildRecipe.model_validate({"deployment": deployment, "build": {"drafter": [format]}})
    published, path = write_deployments(recipe, {"target": Source(target, "0", {})}, folder)
    assert (published.name, load_deployment(published).drafter) == ("serve-bf16.yaml", recipe.deployment.drafter)
    return path


@pytest.mark.parametrize(
    ("format", "gpu", "fits"), [("fp8", "h200", True), ("nvfp4", "b200", True), ("nvfp4", "h200", False)]
)
def test_a_built_drafter_is_served_and_rendered(format: Format, gpu: str, fits: bool, tmp_path: Path) -> None:
    file = built(tmp_path, format, gpu=gpu)
    launch = backend.launch(load_deployment(file))
    assert (launch.problems == []) is fits
    words = ["deploy", str(file), "--backend", "tensorrt-llm", "--render", "helm"]
    result = CliRunner().invoke(app, [*words, "--image", f"x/y@sha256:{64 * '0'}"])
    assert (result.exit_code == 0) is fits
    if fits:
        assert f"drafter-{format}" in result.stdout
        launch.prepare(tmp_path / "prepared")
        assert "--custom_module_dirs" in launch.command(tmp_path / "prepared").argv
        assert "quantization_config" in json.loads((tmp_path / "prepared" / "draft" / "config.json").read_text())


MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
TARGETS: dict[str, dict[str, object] | None] = {
    "bf16": None,
    "FP8, ModelOpt": {**MODELOPT, "quant_algo": "FP8"},
    "FP8 by block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "NVFP4, ModelOpt": {**MODELOPT, "quant_algo": "NVFP4"},
    "MXFP4": {"quant_method": "mxfp4"},
    "INT4, compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": INT4}},
    },
}  # fmt: skip
ENGINES = ("torch", "sglang", "vllm", "tensorrt-llm")


def test_the_readmes_table_is_what_the_engines_checks_say(tmp_path: Path) -> None:
    """A cell: the drafter formats that go with such a target on a B200, and `*` where an H200 does not take them."""
    config = tiny_drafter_config(intermediate_size=64)
    deployment, drafters = tiny_deployment(tmp_path, config), {"bf16": tmp_path / "drafter"}
    for format in FORMATS:
        drafters[format.upper()] = write_quantized_drafter(tmp_path / format, format, config)
    sizes = {
        "intermediate_size": 64,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    }

    def cell(engine: str) -> str:
        found = []
        for name, folder in drafters.items():
            sections = {"drafter": {"model": str(folder)}, "speculation": {"width": 4}}
            on = [changed(deployment, **sections, hardware={"gpu": gpu}) for gpu in ("b200", "h200")]
            blackwell, hopper = (server_backend(engine).launch(each).problems == [] for each in on)
            found += [name + ("" if hopper else "*")] if blackwell else []
        return ", ".join(found) or "no"

    for name, recipe in TARGETS.items():
        edit_json(tmp_path / "target" / "config.json", {**sizes, "quantization_config": recipe})
        line = " | ".join([f"| {name}", *map(cell, ENGINES)]) + " |"
        assert line in README.read_text().splitlines(), line


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_drafter_that_0_1_0_built_is_refused_with_the_step_that_mends_it(format: Format, tmp_path: Path) -> None:
    """Its q/k/v and gate/up have scales of their own."""
    file = built(tmp_path, format, fused=False)
    result = CliRunner().invoke(app, ["serve", str(file), "--backend", "tensorrt-llm", "--dry-run"])
    assert result.exit_code != 0
    said = " ".join((result.output + str(result.exception)).split())
    assert "gate_proj, up_proj of layers.0.mlp do not share their scales, nor do 3 other groups" in said
    assert "`dflash-serve convert` gives them one" in said

"""Recipes are read strictly, their steps come in an order that works, and their launches are written down.

After a wanted change: GOLDEN=write pytest tests/unit/engines/test_recipes.py, and read the difference.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from dflash_engines.cli import make_steps
from dflash_engines.recipe import BuildRecipe, find_recipe, load_recipe
from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.adapter.registry import backend
from dflash_serve.cli.main import app
from dflash_serve.common.settings import overlay
from dflash_serve.deployment.description import Model
from dflash_serve.errors import UserError
from tests.support.golden_deployments import hub
from tests.unit.cli.test_verbs_hand_fields_on import CHANGED

__all__ = ["hub"]
GOLDEN = Path(__file__).with_name("golden") / "recipes.txt"

RECIPES = sorted((Path(__file__).parents[3] / "engines" / "recipes").glob("*.yaml"))
SOURCES = {"target", "drafter", "calibration prompts", "acceptance prompts"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_step_comes_after_what_it_needs(path: Path) -> None:
    known = set(SOURCES)
    for step in make_steps(load_recipe(path)):
        assert set(step.needs) <= known
        assert step.about
        known.add(step.name)


def rows(path: Path) -> Iterator[str]:
    """The steps of a recipe's build, and its launch on each engine that serves from a command line of its own."""
    recipe = load_recipe(path)
    steps = [f"{step.name} ({', '.join(step.needs)})" for step in make_steps(recipe)]
    yield f"{path.stem} build | {'; '.join(steps) or 'nothing'}"
    for name in ("sglang", "vllm"):
        launch = cast(ServerBackend, backend(name)).launch(recipe.deployment)
        argv = launch.command(Path("/prepared")).argv[1:]
        told = f"refused: {launch.problems[0].what}" if launch.problems else shlex.join(argv)
        yield f"{path.stem} {name} | {told}"


@pytest.mark.usefixtures("hub")
def test_steps_and_launches_of_every_recipe_are_the_golden_ones() -> None:
    """TensorRT-LLM's, with the values of their configuration: tests/unit/tensorrt_llm/golden."""
    text = "".join(f"{row}\n" for path in RECIPES if path.stem != "smollm2" for row in rows(path))
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_built_in_recipe_can_be_named(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path(path.stem)) == path
    told = CliRunner().invoke(app, ["build", path.stem, "--dry-run"])
    assert told.exit_code == 0, told.output


def test_a_name_of_none_is_told_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="neither a file nor a recipe's name") as caught:
        find_recipe(Path("kimi-k2.5-b20"))
    assert "kimi-k2.5-b200" in caught.value.do


@pytest.mark.parametrize("text", ["", "- a list\n"])
def test_a_file_that_is_no_mapping_is_told_how_to_begin(text: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="not a mapping") as caught:
        load_recipe(path)
    assert (caught.value.where, "deployment:" in caught.value.do) == (str(path), True)


def test_a_recipe_without_a_build_says_so() -> None:
    (path,) = (path for path in RECIPES if path.stem == "qwen3.8-27b-dflash2-b200")
    told = CliRunner().invoke(app, ["build", str(path), "--dry-run"])
    assert (told.exit_code, told.output) == (0, f"nothing to build in {path}\n")


SERVERS = {
    field for field in CHANGED if field.partition(".")[0] in ("parallel", "kv_cache", "serving", "role", "pair")
} | {
    *("limits.max_batch_size", "limits.max_queued_requests", "limits.max_num_tokens", "hardware.count"),
    *("target.quantization", "speculation.width"),
}
"""Fields of a deployment that say how the outputs of a build are served, and not what is measured during it."""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text("deployment: {target: {model: a}, drafter: {model: b}}\n" + text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("build: {commands: [edge-llm]}", "unknown key build.commands"),
        ('tensorrt_llm: "1.4"', "unknown key tensorrt_llm"),
        ("build: {drafters: [fp8]}", r"unknown key build.drafters; did you mean build.drafter\?"),
        ("buld: {}", r"unknown key buld; did you mean build\?"),
        ("build: {drafter: [int4]}", "build.drafter"),
        ("build: [", "not valid YAML"),
    ],
)
def test_a_mistake_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(write(tmp_path, text))


def test_a_target_is_calibrated_on_hundreds_of_long_answers_unless_told_otherwise(tmp_path: Path) -> None:
    calibration = load_recipe(write(tmp_path, "build: {target: [fp8]}")).build.calibration
    assert (calibration.count, calibration.max_tokens) == (512, 512)


@pytest.mark.parametrize("field", sorted(set(CHANGED) - SERVERS))
def test_what_a_build_measures_is_of_its_deployment(field: str) -> None:
    """A key of the deployment reaches the engine that answers, unless it is of the server that the build is for."""
    usual = {"target": {"model": "a"}, "drafter": {"model": "b"}}
    section, _, key = field.partition(".")
    changed = overlay(usual, {section: {key: CHANGED[field]} if key else CHANGED[field]})
    before, after = (BuildRecipe.model_validate({"deployment": each}) for each in (usual, changed))
    assert after.measured != before.measured
    own = before.measured_by("speculation", "hardware", "engine_args")
    if section not in ("target", "drafter", "limits"):
        assert after.measured_by("speculation", "hardware", "engine_args") != own, "the step is done again"


def test_keys_of_the_server_are_not_of_the_engine_that_answers() -> None:
    changed: dict[str, Any] = {}
    for field in SERVERS:
        section, _, key = field.partition(".")
        changed = overlay(changed, {section: {key: CHANGED[field]} if key else CHANGED[field]})
    changed = overlay(changed, {"target": {"model": "a"}, "drafter": {"model": "b"}})
    usual = {"target": {"model": "a"}, "drafter": {"model": "b"}}
    one, other = (BuildRecipe.model_validate({"deployment": each}) for each in (usual, changed))
    assert one.measured == other.measured


def test_models_of_a_recipe_are_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    deployment = load_recipe(write(tmp_path, "")).deployment
    assert (deployment.target.model, deployment.drafter) == (str(tmp_path / "a"), Model(model="b"))


def test_a_variable_with_an_empty_default_need_not_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 'build: {acceptance: {prompts: "${SOME_PROMPTS:-}"}, drafter: [fp8]}')
    monkeypatch.delenv("SOME_PROMPTS", raising=False)
    assert "acceptance" not in [step.name for step in make_steps(load_recipe(path))]
    monkeypatch.setenv("SOME_PROMPTS", "/prompts.jsonl")
    assert "acceptance" in [step.name for step in make_steps(load_recipe(path))]


def test_no_drafter_is_judged_on_prompts_that_it_was_calibrated_on() -> None:
    for recipe in map(load_recipe, RECIPES):
        acceptance, calibration = recipe.build.acceptance, recipe.build.calibration
        assert acceptance is None or calibration.free or acceptance.skip >= calibration.count


def test_a_plan_costs_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from dflash_engines.cli import make_steps;"
        f"from dflash_engines.recipe import load_recipe; make_steps(load_recipe(Path({str(RECIPES[-1])!r})));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_drafter_alone_is_built_without_its_target(tmp_path: Path) -> None:
    """What gpt-oss and Kimi need: nobody wants to fetch 600 GB to quantise 6."""
    steps = make_steps(load_recipe(write(tmp_path, "build: {drafter: [fp8], calibration: {free: true}}")))
    assert [step.name for step in steps] == ["drafter-ranges", "drafter-fp8"]
    assert all("target" not in step.needs for step in steps)
    with pytest.raises(UserError, match="a target is calibrated on data"):
        make_steps(load_recipe(write(tmp_path, "build: {target: [fp8], calibration: {free: true}}")))

"""Recipes are read strictly, and their steps come in an order that works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_engines.cli import make_steps
from dflash_engines.recipe import load_recipe
from dflash_serve.errors import UserError

RECIPES = sorted((Path(__file__).parents[3] / "engines" / "recipes").glob("*.yaml"))
SOURCES = {"target", "drafter", "calibration prompts", "acceptance prompts"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_step_comes_after_what_it_needs(path: Path) -> None:
    known = set(SOURCES)
    for step in make_steps(load_recipe(path)):
        assert set(step.needs) <= known
        assert step.about
        known.add(step.name)


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

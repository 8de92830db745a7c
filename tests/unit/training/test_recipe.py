"""A recipe is read whole or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.errors import UserError
from dflash_serve.training.recipe import load_recipe

RECIPE = """
target: {model: smollm2}
data:
  prompts: [{kind: file, name: maths, path: "${PROMPTS_FOLDER}/a.jsonl"}]
drafter: {mask_token_id: 16}
training: {steps: 10}
"""
SHIPPED = Path(__file__).parents[3] / "dflash_serve/assets/smollm2-135m-instruct-dflash/training.yaml"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _prompts_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTS_FOLDER", "/somewhere")


def test_variables_come_from_the_environment(tmp_path: Path) -> None:
    (source,) = load_recipe(write(tmp_path, RECIPE)).data.prompts
    assert source.kind == "file"
    assert source.path == Path("/somewhere/a.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps: 10", "steps: 10, setps: 3"), r"unknown key training.setps; did you mean training.steps\?"),
        (("steps: 10", "steps: 10, minutes: 3"), "exactly one budget"),
        (("steps: 10", "lr: 1.0e-3"), "exactly one budget"),
        (("steps: 10", "steps: yes"), "training.steps: Input should be a valid integer.*the boolean true"),
        (("steps: 10", "steps: 10, lr: on"), "training.lr: Input should be a valid number.*the boolean true"),
        (("steps: 10", "steps: 10, betas: [0.9, off]"), "training.betas.1: .*the boolean false"),
        (("steps: 10", "steps: 10, steps: 20"), "the key 'steps' is given twice, in lines 6 and 6"),
        (("steps: 10", "steps: 10, seen_at_least: 4"), "seen_at_least: 4 needs reduced_vocabulary: true"),
        (("PROMPTS_FOLDER", "NOT_SET_ANYWHERE"), r"\$\{NOT_SET_ANYWHERE\} is not set"),
        (
            ("steps: 10", "steps: 10, short_blocks: {block_size: 8, until: 0.5}"),
            "8 slots are not fewer than the drafter's 8",
        ),
        (("drafter:", "  answers: {slots: 4}\ndrafter:"), "`slots` is called `max_batch_size` now"),
        (("drafter:", "  answers: {keep_features: true}\ndrafter:"), "`keep_features` is gone"),
        (("drafter:", "  texts: []\ndrafter:"), "`texts` is gone: .*give more prompts"),
        (("steps: 10", "steps: 10, soft_loss: lk"), "`soft_loss` is gone: `soft_labels` is the share of `tv`"),
        (("steps: 10", "steps: 10, ema: 0.9"), "`ema` is gone: the best held-out step is written"),
        (("steps: 10", "steps: 10, feature_cache_gib: 1"), "`feature_cache_gib` is gone"),
        (("kind: file", "kind: magic"), "magic"),
        (("mask_token_id: 16", "mask_token_id: -1"), "drafter.mask_token_id"),
        (("training: {steps: 10}", "training: {steps: 10"), "not valid YAML"),
    ],
)
def test_a_bad_recipe_is_refused_in_one_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_recipe(write(tmp_path, RECIPE.replace(*change)))
    assert "\n" not in str(error.value)


def test_a_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")


def test_the_shipped_recipe_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROMPTS", "EVALUATION"):
        monkeypatch.setenv(name, "/somewhere")
    assert load_recipe(SHIPPED).drafter.block_size == 8

"""What `build --dry-run` says of every recipe is written down in golden/.

After a wanted change: GOLDEN=write pytest tests/unit/engines/test_dry_runs.py, and read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_serve.cli.main import app

RECIPES = sorted((Path(__file__).parents[3] / "engines" / "recipes").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_build_is_planned_as_written_down(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMPTS", raising=False)
    told = CliRunner().invoke(app, ["build", str(recipe), "--dry-run", "--json"])
    assert told.exit_code == 0, told.output
    lines = [f"{step['step']} <- {', '.join(step['needs'])}: {step['about']}" for step in json.loads(told.stdout)]
    path, text = GOLDEN / f"{recipe.stem}.txt", "\n".join(lines) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_there_is_none_for_a_recipe_that_is_gone() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {path.stem for path in RECIPES}

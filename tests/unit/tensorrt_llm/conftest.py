"""Hub models as folders of config.json, so that nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflash_serve.assets import bundled_drafter
from dflash_serve.deployment import Deployment, Model
from dflash_serve.drafter.source import local_folder
from dflash_tensorrt_llm import plan
from tests.unit.drafter.published import PUBLISHED
from tests.unit.tensorrt_llm.published_targets import TARGETS

RECIPES = Path(__file__).parents[3] / "engines" / "recipes"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `owner/name` for every published model, found by their ids."""
    configs = {f"z-lab/{row.name}": row.config_json() for row in PUBLISHED} | TARGETS
    for name, config in configs.items():
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))

    def config_folder(model: Model) -> Path:
        found = tmp_path / "hub" / model.model
        return found if found.is_dir() else local_folder(model.model)

    monkeypatch.setattr(plan, "target_config", config_folder)
    monkeypatch.setattr(plan, "drafter_config", lambda model: bundled_drafter(model.model) or config_folder(model))
    return tmp_path / "hub"


@pytest.fixture
def recipe() -> Callable[[str], Deployment]:
    """The Deployment of a recipe by its name."""
    return lambda name: Deployment.model_validate(yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["deployment"])

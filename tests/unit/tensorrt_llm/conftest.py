"""Hub models as folders of config.json, so that nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.source import drafter_source, local_folder
from dflash_serve.deployment import Deployment, Model
from dflash_tensorrt_llm import launch_plan
from tests.support.tiny import write_tiny_drafter
from tests.unit.checkpoint.published import PUBLISHED
from tests.unit.tensorrt_llm.published_targets import TARGETS

RECIPES = Path(__file__).parents[3] / "engines" / "recipes"


def tiny_deployment(folder: Path, config: DrafterConfig, dialect: str = "zlab") -> Deployment:
    """A target and a drafter of `config` below `folder`, on one H200."""
    write_tiny_drafter(folder / "drafter", config, dialect=dialect)
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 96, "num_attention_heads": 4}
    (folder / "target").mkdir()
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes}
    (folder / "target" / "config.json").write_text(json.dumps(raw))
    return Deployment.model_validate({
        "target": {"model": str(folder / "target")}, "drafter": {"model": str(folder / "drafter")},
        "limits": {"max_model_len": 128}, "hardware": {"gpu": "h200"},
    })  # fmt: skip


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

    monkeypatch.setattr(launch_plan, "target_configuration", config_folder)
    monkeypatch.setattr(
        launch_plan, "drafter_configuration", lambda model: config_folder(Model(model=str(drafter_source(model.model))))
    )
    return tmp_path / "hub"


@pytest.fixture
def recipe() -> Callable[[str], Deployment]:
    """The Deployment of a recipe by its name."""
    return lambda name: Deployment.model_validate(yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["deployment"])

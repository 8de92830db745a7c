"""Tiny deployments, the recipes' deployments, and config.yaml as it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.deployment.description import Deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.upstream import Release
from tests.support.golden_deployments import hub
from tests.support.tiny import write_tiny_drafter

__all__ = ["hub"]
RECIPES = Path(__file__).parents[3] / "engines" / "recipes"
PREPARED = Path("/prepared")


def tiny_deployment(folder: Path, config: DrafterConfig, dialect: str | None = None) -> Deployment:
    """A target and a drafter of `config` below `folder`, on one H200; the dialect is one that has its heads."""
    dialect = dialect or ("zlab" if config.markov is None and config.slots == "fill-in" else "deepspec")
    write_tiny_drafter(folder / "drafter", config, dialect=dialect)
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 96, "num_attention_heads": 4}
    (folder / "target").mkdir()
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes}
    (folder / "target" / "config.json").write_text(json.dumps(raw))
    return Deployment.model_validate({
        "target": {"model": str(folder / "target")}, "drafter": {"model": str(folder / "drafter")},
        "limits": {"max_model_len": 128}, "hardware": {"gpu": "h200"},
    })  # fmt: skip


def changed(deployment: Deployment, **sections: Any) -> Deployment:
    """The deployment with other sections; keys of a section that are not named stay."""
    fields = deployment.model_dump(exclude_unset=True)
    merged = {key: {**fields.get(key, {}), **value} for key, value in sections.items()}
    return Deployment.model_validate({**fields, **merged})


def backend(release: str = "1.4") -> TensorRTLLMBackend:
    return TensorRTLLMBackend(Release.parse(release))


def configuration(deployment: Deployment, release: str = "1.4") -> dict[str, Any]:
    """config.yaml of a deployment without problems, as a dry run shows it."""
    launch = backend(release).launch(deployment)
    assert launch.problems == []
    files = {file.name: file.text for file in launch.files(PREPARED)}
    found: dict[str, Any] = yaml.safe_load(files["config.yaml"] or "")
    return found


@pytest.fixture
def recipe() -> Callable[[str], Deployment]:
    """The Deployment of a recipe by its name."""
    return lambda name: Deployment.model_validate(yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["deployment"])

"""Training in miniature: twenty prompts, and a recipe of a few steps on a tiny target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash_serve.training.recipe import TrainingRecipe

STEPS = 12


def write_prompts(path: Path) -> Path:
    """Twenty user turns, one {"prompt": text} a line; returns the path."""
    path.write_text("".join(json.dumps({"prompt": f"the quick brown fox {i}"}) + "\n" for i in range(20)))
    return path


def tiny_recipe(
    target: str, prompts: Path, drafter: Mapping[str, object] | None = None, **training: object
) -> TrainingRecipe:
    """A recipe of `STEPS` steps.

    Args:
        drafter: keys of the section, beside or instead of the usual ones; `training` likewise.
    """
    shape = {"num_layers": 1, "block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2]}
    settings = {"steps": STEPS, "sequences": 3, "anchors": 6, "validate_every": 6, "log_every": 2}
    return TrainingRecipe.model_validate(
        {
            "target": {"model": target},
            "data": {
                "prompts": [{"kind": "file", "name": "foxes", "path": prompts}],
                "answers": {"max_batch_size": 8, "max_new_tokens": 24, "shard_size": 8},
                "validation_share": 0.2,
            },
            "drafter": {**shape, **(drafter or {})},
            "training": {**settings, **training},
        }
    )

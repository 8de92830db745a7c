"""Every published z-lab drafter is understood."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch

from dflash_serve.checkpoint.config import expected_tensors
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.models.drafter import Drafter
from tests.unit.checkpoint.published import PUBLISHED, Published

EACH = pytest.mark.parametrize("published", PUBLISHED, ids=lambda row: row.name)


def write(folder: Path, raw: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@EACH
def test_every_published_config_parses(published: Published, tmp_path: Path) -> None:
    config, dialect = read_config(write(tmp_path, published.config_json()))
    assert dialect == "zlab"
    assert config.block_size == published.block_size
    assert config.target_layer_ids == tuple(published.target_layer_ids)
    assert config.num_target_layers == published.num_target_layers
    assert (config.mask_token_id, config.vocab_size) == published.vocabulary
    windows = [published.window] * (published.layers - 1) + [None]
    assert [kind.window for kind in config.layers] == windows
    assert [kind.causal for kind in config.layers] == [window is not None for window in windows]


@EACH
def test_the_model_has_the_published_tensors_and_size(published: Published, tmp_path: Path) -> None:
    config, _ = read_config(write(tmp_path, published.config_json()))
    with torch.device("meta"):
        drafter = Drafter(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert shapes == expected_tensors(config)
    assert len(shapes) == (15 if published.attention_bias else 11) * published.layers + 3
    gib = 2 * sum(prod(shape) for shape in shapes.values()) / 2**30
    assert gib == pytest.approx(published.gib, rel=0.02)

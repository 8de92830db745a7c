"""A new drafter has its target's shape and, at first, its last layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_target
from dflash_serve.models.target import TargetModel
from dflash_serve.training.initialise import drafter_config, new_drafter
from dflash_serve.training.recipe import DrafterSection


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> TargetModel:
    return load_target(str(tiny_target_folder))


def test_the_layers_are_the_last_of_the_target(target: TargetModel) -> None:
    section = DrafterSection(num_layers=2, mask_token_id=3, num_features=1)
    drafter = new_drafter(drafter_config(section, target.config), target, init="target", seed=0)
    for index, layer in enumerate(drafter.layers):
        for name, weight in target.layer_weights(2 + index).items():
            torch.testing.assert_close(layer.get_parameter(name), weight)
    torch.testing.assert_close(drafter.fc.weight, torch.eye(32), atol=0.02, rtol=0)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in drafter.parameters())


@pytest.mark.parametrize("init", ["target", "random"])
def test_the_same_seed_gives_the_same_drafter(target: TargetModel, init: str) -> None:
    config = drafter_config(DrafterSection(num_layers=1, mask_token_id=3, num_features=1), target.config)
    first, same, other = (new_drafter(config, target, init=init, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert all(torch.isfinite(weight).all() for weight in first.values())


def test_training_goes_on_from_another_drafter(target: TargetModel, tmp_path: Path) -> None:
    config = drafter_config(DrafterSection(num_layers=1, mask_token_id=3, num_features=1), target.config)
    before = new_drafter(config, target, init="target", seed=7)
    write_drafter(tmp_path / "before", config, before.state_dict())
    drafter = new_drafter(config, target, init=str(tmp_path / "before"), seed=0)
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in drafter.state_dict().items())
    assert all(p.requires_grad for p in drafter.parameters())
    other = drafter_config(DrafterSection(num_layers=1, mask_token_id=4, num_features=1), target.config)
    with pytest.raises(UserError, match="its mask_token_id differ"):
        new_drafter(other, target, init=str(tmp_path / "before"), seed=0)


def test_a_layer_the_target_does_not_have_is_refused(target: TargetModel) -> None:
    with pytest.raises(UserError, match=r"layers 0\.\.3"):
        drafter_config(DrafterSection(mask_token_id=3, target_layer_ids=(1, 9)), target.config)

"""A new drafter has its target's shape and, at first, its last layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.conversions import with_markov_head
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter, load_target
from dflash_serve.models.target import TargetModel
from dflash_serve.training.blocks import SlotForward, lay_out
from dflash_serve.training.recipe import DrafterSection
from dflash_serve.training.run import drafter_config, new_drafter


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> TargetModel:
    return load_target(str(tiny_target_folder))


def described(target: TargetModel, **changes: object) -> DrafterConfig:
    """A drafter of one layer, but for the changes."""
    section = {"num_layers": 1, "mask_token_id": 3, "num_features": 1, **changes}
    return drafter_config(DrafterSection.model_validate(section), target.config)


def test_the_layers_are_the_last_of_the_target(target: TargetModel) -> None:
    drafter = new_drafter(described(target, num_layers=2), target, init="target", seed=0)
    for index, layer in enumerate(drafter.layers):
        for name, weight in target.layer_weights(2 + index).items():
            torch.testing.assert_close(layer.get_parameter(name), weight)
    torch.testing.assert_close(drafter.fc.weight, torch.eye(32), atol=0.02, rtol=0)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in drafter.parameters())


@pytest.mark.parametrize("init", ["target", "random"])
def test_the_same_seed_gives_the_same_drafter(target: TargetModel, init: str) -> None:
    config = described(target)
    first, same, other = (new_drafter(config, target, init=init, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert all(torch.isfinite(weight).all() for weight in first.values())


def test_training_goes_on_from_another_drafter(target: TargetModel, tmp_path: Path) -> None:
    config = described(target)
    before = new_drafter(config, target, init="target", seed=7)
    write_drafter(tmp_path / "before", config, before.state_dict())
    drafter = new_drafter(config, target, init=str(tmp_path / "before"), seed=0)
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in drafter.state_dict().items())
    assert all(p.requires_grad for p in drafter.parameters())
    drafter = new_drafter(described(target, block_size=5), target, init=str(tmp_path / "before"), seed=0)
    assert drafter.config.block_size == 5
    assert torch.equal(drafter.fc.weight, before.fc.weight)
    with pytest.raises(UserError, match="its mask_token_id differ"):
        new_drafter(described(target, mask_token_id=4), target, init=str(tmp_path / "before"), seed=0)


def test_convolutions_begin_idle_on_a_plain_backbone_and_learn(target: TargetModel, tmp_path: Path) -> None:
    before = new_drafter(described(target, num_layers=2, block_size=4), target, init="target", seed=7)
    write_drafter(tmp_path / "before", before.config, before.state_dict())
    config = described(target, num_layers=2, block_size=4, convolution={"taps": 2, "group_size": 8})
    convolved = new_drafter(config, target, init=str(tmp_path / "before"), seed=0)
    sequences = [torch.randint(0, target.config.vocab_size, (17,), generator=torch.Generator().manual_seed(1))]
    blocks = lay_out(sequences, [torch.tensor([5, 9])], 4)
    features = [torch.randn(17, before.config.feature_size, generator=torch.Generator().manual_seed(2))]
    wanted, hidden = (
        SlotForward(drafter, target.embedding, dtype=torch.float32)(blocks, features).hidden
        for drafter in (before, convolved)
    )
    assert torch.equal(hidden, wanted)
    (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    for name, parameter in convolved.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name
    write_drafter(tmp_path / "after", convolved.config, convolved.state_dict())
    assert load_drafter(tmp_path / "after").config.convolution == config.convolution
    with pytest.raises(UserError, match="its convolution differ"):
        new_drafter(before.config, target, init=str(tmp_path / "after"), seed=0)


HEADS: Mapping[str, Mapping[str, object]] = {
    "vanilla": {"markov": {"kind": "vanilla", "rank": 6}},
    "gated": {"markov": {"kind": "gated", "rank": 6}, "confidence": {"with_markov": True}},
    "rnn": {"markov": {"kind": "rnn", "rank": 6}, "confidence": {"with_markov": False}},
    "with convolutions": {"markov": {"kind": "vanilla", "rank": 6}, "convolution": {"taps": 2, "group_size": 8}},
}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_a_plain_backbone_is_given_heads_that_change_nothing_yet(
    target: TargetModel, tmp_path: Path, heads: Mapping[str, object]
) -> None:
    before = new_drafter(described(target, num_layers=2, block_size=4), target, init="target", seed=7)
    write_drafter(tmp_path / "before", before.config, before.state_dict())
    config = described(target, num_layers=2, block_size=4, **heads)
    headed, again = (new_drafter(config, target, init=str(tmp_path / "before"), seed=0) for _ in "ab")
    state = headed.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in before.state_dict().items())
    assert all(torch.equal(weight, state[name]) for name, weight in again.state_dict().items())
    assert headed.markov_head is not None
    bias, _ = headed.markov_head(torch.arange(4), torch.randn(4, 32), None)
    assert not bias.any()
    assert bool(headed.markov_head.markov_w1.weight.any())  # or nothing could be learnt
    if headed.confidence_head is not None:
        known = torch.randn(4, 6) if config.confidence and config.confidence.with_markov else None
        assert headed.confidence_head(torch.randn(4, 32), known).sigmoid().tolist() == [0.5] * 4
    if config.convolution is None:  # and the converter's heads can be gone on from
        converted, tensors = with_markov_head(before.config, before.state_dict(), rank=6, fresh=True)
        write_drafter(tmp_path / "converted", converted, tensors, dialect="deepspec")
        wanted = config.model_copy(update={"markov": converted.markov, "confidence": None})
        given = new_drafter(wanted, target, init=str(tmp_path / "converted"), seed=0).state_dict()
        assert all(torch.equal(given[name], tensor) for name, tensor in tensors.items())


def test_heads_that_a_drafter_has_are_not_taken_from_it(target: TargetModel, tmp_path: Path) -> None:
    before = new_drafter(described(target, **HEADS["gated"]), target, init="target", seed=7)
    write_drafter(tmp_path / "before", before.config, before.state_dict(), dialect="deepspec")
    with pytest.raises(UserError, match="its markov, confidence differ"):
        new_drafter(described(target), target, init=str(tmp_path / "before"), seed=0)
    other = described(target, **HEADS["gated"], slots="anchor-first")
    with pytest.raises(UserError, match="its slots differ"):
        new_drafter(other, target, init=str(tmp_path / "before"), seed=0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_layer_ids": (1, 9)}, r"layers 0\.\.3"),
        ({"convolution": {"taps": 2, "group_size": 7}}, "7 does not divide hidden_size 32"),
        ({"confidence": {"with_markov": True}}, "there is no Markov head"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(target: TargetModel, section: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        described(target, **section)

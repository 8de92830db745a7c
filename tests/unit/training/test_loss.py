"""The chunked loss with its own gradient is the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.training.loss import SlotLoss, Weighting

BLOCKS, SLOTS, HIDDEN, VOCABULARY = 7, 3, 8, 20


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets = torch.randint(VOCABULARY, (BLOCKS, SLOTS), generator=generator)
    valid = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    valid[3, 1:] = False
    return hidden, head, targets, valid


def plain_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy((hidden @ head.t()).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(targets) * weights).sum() / weights.sum()


@pytest.mark.parametrize("weighting", [Weighting(alpha=0.5), Weighting(alpha=None, gamma=4.0)])
@pytest.mark.parametrize("blocks_at_once", [2, 100])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(weighting: Weighting, blocks_at_once: int) -> None:
    hidden, head, targets, valid = inputs()
    loss, scores = SlotLoss(head, weighting, blocks_at_once=blocks_at_once)(hidden, targets, valid)
    loss.backward()
    gradient, hidden.grad = hidden.grad, None
    expected = plain_loss(hidden, head, targets, scores.weights)
    expected.backward()
    assert hidden.grad is not None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, hidden.grad)


def test_scores_alone_are_the_same_scores() -> None:
    hidden, head, targets, valid = inputs()
    loss = SlotLoss(head, Weighting(), blocks_at_once=3)
    _, first = loss(hidden, targets, valid)
    second = loss.scores(hidden, targets, valid)
    assert torch.equal(first.hit, second.hit)
    torch.testing.assert_close(first.weights, second.weights)


def test_dpace_follows_its_formula() -> None:
    probability, valid = torch.tensor([[0.8, 0.4, 0.2]]), torch.ones(1, 3, dtype=torch.bool)
    q1, q2, q3 = 0.9, 0.7, 0.6
    products = [q1, q1 * q2, q1 * q2 * q3]
    expected = torch.tensor([[sum(products), products[1] + products[2], products[2]]])
    torch.testing.assert_close(Weighting(alpha=0.5)(probability, valid), expected)


def test_slots_behind_the_end_weigh_nothing() -> None:
    probability, valid = torch.full((1, 3), 0.5), torch.tensor([[True, True, False]])
    assert Weighting(alpha=0.5)(probability, valid)[0, 2] == 0
    assert Weighting(alpha=None)(probability, valid)[0, 2] == 0

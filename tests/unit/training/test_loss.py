"""The chunked loss is the plain one, and so are its gradients."""

from __future__ import annotations

from typing import Any, Never

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.models.compiled.build import find_compiler
from dflash_serve.training.blocks import Compiled, Labels, Predictions
from dflash_serve.training.loss import SlotLoss, SlotScores, Weighting, confidence_loss

BLOCKS, SLOTS, HIDDEN, RANK, VOCABULARY = 7, 3, 8, 5, 20
KEPT = torch.tensor([0, 2, 3, 5, 8, 9, 13, 17, 18, 19])


def inputs(*, markov: bool) -> tuple[Predictions, Tensor, Labels]:
    """Predictions that want gradients, the head, and labels with a teacher."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, head, teacher = rows(BLOCKS, SLOTS, HIDDEN), rows(VOCABULARY, HIDDEN), rows(BLOCKS, SLOTS, HIDDEN)
    targets = KEPT[torch.randint(len(KEPT), (BLOCKS, SLOTS), generator=generator)]
    valid = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    valid[3, 1:] = False
    latent, bias = (rows(BLOCKS, SLOTS, RANK), rows(VOCABULARY, RANK)) if markov else (None, None)
    for tensor in (hidden, latent, bias):
        if tensor is not None:
            tensor.requires_grad_()
    return Predictions(hidden, latent, bias), head, Labels(targets, valid, teacher)


def plain_loss(
    predictions: Predictions, head: Tensor, labels: Labels, weights: Tensor, soft: float, kept: Tensor | None
) -> Tensor:
    """By autograd, all logits at once."""
    assert labels.teacher is not None
    logits, wanted = predictions.hidden @ head.t(), labels.teacher @ head.t()
    if predictions.latent is not None and predictions.bias is not None:
        logits = logits + predictions.latent @ predictions.bias.t()
    targets = labels.targets
    if kept is not None:
        logits, wanted, targets = logits[..., kept], wanted[..., kept], torch.searchsorted(kept, targets)
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    distance = (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
    return (((1 - soft) * cross_entropy + soft * distance) * weights).sum() / weights.sum()


@pytest.mark.parametrize("weighting", [Weighting(alpha=0.5), Weighting(alpha=None, gamma=4.0)], ids=["dpace", "decay"])
@pytest.mark.parametrize("blocks_at_once", [2, 100])
@pytest.mark.parametrize("markov", [False, True], ids=["plain", "markov"])
@pytest.mark.parametrize("soft", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["all tokens", "reduced"])
def test_loss_and_gradients_are_those_of_autograd(
    weighting: Weighting, blocks_at_once: int, markov: bool, soft: float, kept: Tensor | None
) -> None:
    predictions, head, labels = inputs(markov=markov)
    own = SlotLoss(head, weighting, soft=soft, kept=kept, blocks_at_once=blocks_at_once)
    loss, scores = own(predictions, labels)
    wanted = [tensor for tensor in predictions if tensor is not None]
    gradients = torch.autograd.grad(3 * loss, wanted)
    expected = plain_loss(predictions, head, labels, scores.weights, soft, kept)
    torch.testing.assert_close(loss, expected)
    for gradient, plain in zip(gradients, torch.autograd.grad(3 * expected, wanted), strict=True):
        torch.testing.assert_close(gradient, plain)


BACKEND = "inductor" if find_compiler() else "aot_eager"


def broken(*_: object) -> Never:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("backend", [BACKEND, broken])
def test_compiled_losses_and_gradients_are_those_of_eager_ones(backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = list[list[Tensor]]()
    for wanted in (False, True):
        predictions, head, labels = inputs(markov=True)
        own = SlotLoss(head, Weighting(), soft=0.5, kept=KEPT, blocks_at_once=4)  # 4 blocks, then 3
        own.compiled = Compiled(own.measure, wanted=wanted, backend=backend)
        loss, scores = own(predictions, labels)
        gradients = torch.autograd.grad(loss, [tensor for tensor in predictions if tensor is not None])
        found.append([each for each in (loss, *gradients, *scores) if each is not None])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)
    said = [record.getMessage() for record in caplog.records if record.name == Compiled.__module__]
    if backend is broken:
        assert len(said) == 1
        assert said[0].startswith("SlotLoss.measure is not compiled: ")
        assert "no compiler here" in said[0]
    else:
        assert own.compiled.fast is not None
        assert said == []


def test_the_soft_loss_has_no_slope_where_the_drafter_is_the_target() -> None:
    _, head, labels = inputs(markov=False)
    assert labels.teacher is not None
    hidden = labels.teacher.clone().requires_grad_()
    loss, scores = SlotLoss(head, Weighting(), soft=1.0)(Predictions(hidden), labels)
    (slope,) = torch.autograd.grad(loss, hidden)
    assert float(slope.abs().max()) < 1e-6
    torch.testing.assert_close(scores.acceptance, torch.ones_like(scores.acceptance))


@pytest.mark.parametrize("soft", [0.0, 0.5])
def test_scores_alone_are_the_same_scores(soft: float) -> None:
    predictions, head, labels = inputs(markov=True)
    loss = SlotLoss(head, Weighting(), soft=soft, blocks_at_once=3)
    _, first = loss(predictions, labels)
    second = loss.scores(predictions, labels)
    assert torch.equal(first.hit, second.hit)
    assert (first.distance is None) == (second.distance is None) == (soft == 0)
    torch.testing.assert_close(first.weights, second.weights)
    torch.testing.assert_close(first.acceptance, second.acceptance)


def test_confidence_learns_what_is_accepted() -> None:
    hit, weights = torch.tensor([[True, False]]), torch.tensor([[1.0, 0.5]])
    hard = SlotScores(torch.zeros(1, 2), weights, hit)
    soft = hard._replace(distance=torch.tensor([[0.4, 2.0]]))
    assert hard.acceptance.tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(soft.acceptance, torch.tensor([[0.8, 0.0]]))  # 1 - TV, as DSpark's
    logits = torch.tensor([[2.0, -1.0]], requires_grad=True)
    for scores in (hard, soft):
        each = F.binary_cross_entropy_with_logits(logits, scores.acceptance, reduction="none")
        torch.testing.assert_close(confidence_loss(logits, scores), (each * weights).sum() / weights.sum())
    (slope,) = torch.autograd.grad(confidence_loss(logits, soft), logits)
    torch.testing.assert_close(slope, weights * (logits.sigmoid() - soft.acceptance) / weights.sum())


def test_dpace_follows_its_formula() -> None:
    probability, valid = torch.tensor([[0.8, 0.4, 0.2]]), torch.ones(1, 3, dtype=torch.bool)
    q1, q2, q3 = 0.9, 0.7, 0.6
    products = [q1, q1 * q2, q1 * q2 * q3]
    expected = torch.tensor([[sum(products), products[1] + products[2], products[2]]])
    torch.testing.assert_close(Weighting(alpha=0.5)(probability, valid), expected)
    valid[0, 2] = False  # behind the end
    assert Weighting(alpha=0.5)(probability, valid)[0, 2] == Weighting(alpha=None)(probability, valid)[0, 2] == 0


def test_a_step_without_a_slot_that_counts_changes_nothing() -> None:
    predictions, head, labels = inputs(markov=True)
    loss = SlotLoss(head, Weighting())(predictions, labels._replace(valid=torch.zeros_like(labels.valid)))[0]
    loss.backward()
    assert loss == 0
    assert predictions.latent is not None
    assert not predictions.hidden.grad.any()  # type: ignore[union-attr]
    assert not predictions.latent.grad.any()  # type: ignore[union-attr]

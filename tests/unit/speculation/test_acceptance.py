import pytest
import torch

from dflash_serve.speculation.acceptance import accept_matching, accept_sampled
from dflash_serve.speculation.noise import BlockNoise


def noise(draw: list[list[float]], accept: list[list[float]]) -> BlockNoise:
    return BlockNoise(torch.tensor(draw, dtype=torch.float64), torch.tensor(accept, dtype=torch.float64))


def logits_for(tokens: list[list[int]], vocab_size: int = 8) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float()


def test_greedy_accepts_until_the_first_difference_and_adds_the_bonus_token() -> None:
    draft = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    logits = logits_for([[1, 2, 3, 4], [1, 5, 3, 4], [7, 2, 3, 4]])
    verdict = accept_matching(draft, logits.argmax(-1), torch.tensor([4, 4, 4]))
    assert verdict.accepted.tolist() == [3, 1, 0]
    assert verdict.bonus_token.tolist() == [4, 5, 7]
    assert verdict.acceptance_length.tolist() == [4, 2, 1]
    assert verdict.committed(draft).tolist() == [[1, 2, 3, 4], [1, 5, -1, -1], [7, -1, -1, -1]]


def test_ragged_widths_ignore_what_lies_beyond_them() -> None:
    draft = torch.tensor([[1, 2, 3], [1, 2, 3], [1, -1, -1], [-1, -1, -1]])  # the second is right beyond its width
    logits = logits_for([[1, 2, 3, 4]] * 4)
    logits[3, 1:] = float("nan")
    verdict = accept_matching(draft, logits.argmax(-1), torch.tensor([4, 3, 2, 1]))
    assert verdict.accepted.tolist() == [3, 2, 1, 0]
    assert verdict.bonus_token.tolist() == [4, 3, 2, 1]


def test_the_ratio_decides_and_the_residual_replaces() -> None:
    p = torch.tensor([[[0.2, 0.5, 0.3], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    draft, widths = torch.tensor([[0]]), torch.tensor([2])
    accepted = accept_sampled(draft, p, widths, noise([[0.1, 0.1]], [[0.39]]), q)
    assert (accepted.accepted.item(), accepted.bonus_token.item()) == (1, 2)
    for u in (0.0, 0.5, 0.999):  # the residual (0, 0, 0.3) leaves one token only
        rejected = accept_sampled(draft, p, widths, noise([[u, u]], [[0.41]]), q)
        assert (rejected.accepted.item(), rejected.bonus_token.item()) == (0, 2)


@pytest.mark.parametrize("q", [None, torch.tensor([[[1.0, 0.0, 0.0]]])])
def test_a_token_of_probability_zero_is_never_accepted(q: torch.Tensor | None) -> None:
    p = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    verdict = accept_sampled(torch.tensor([[0]]), p, torch.tensor([2]), noise([[0.0, 0.0]], [[0.0]]), q)
    assert (verdict.accepted.item(), verdict.bonus_token.item()) == (0, 1)


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    q = torch.tensor([[[0.25, 0.75]]])
    p = torch.cat([q * (1 - 1e-7), q], dim=1)  # p <= q everywhere: a rejection here can only be rounding
    verdict = accept_sampled(torch.tensor([[1]]), p, torch.tensor([2]), noise([[0.1, 0.9]], [[1 - 1e-9]]), q)
    assert (verdict.accepted.item(), verdict.bonus_token.item()) == (0, 0)


def test_the_bonus_token_of_a_narrow_width_ignores_the_drafters_distribution() -> None:
    p, q = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    verdict = accept_sampled(torch.tensor([[0]]), p, torch.tensor([1]), noise([[0.1, 0.1]], [[0.9]]), q)
    assert (verdict.accepted.item(), verdict.bonus_token.item()) == (0, 0)


def test_shapes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"draft \(1, 2\), target \(1, 2\) rows"):
        accept_matching(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1))
    p = torch.full((1, 2, 2), 0.5)
    with pytest.raises(ValueError, match="draft_probabilities"):
        accept_sampled(torch.tensor([[0]]), p, torch.tensor([2]), noise([[0, 0]], [[0]]), p)

import pytest
import torch

from dflash_serve.speculation.acceptance import accept_matching, accept_sampled


@pytest.mark.parametrize(
    ("draft", "tokens", "width", "gained"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 4, [1, 2, 3, 4]),
        ([1, 2, 3], [1, 5, 3, 4], 4, [1, 5, -1, -1]),
        ([1, 2, 3], [7, 2, 3, 4], 4, [7, -1, -1, -1]),
        ([1, 2, 3], [1, 2, 3, 4], 2, [1, 2, -1, -1]),
        ([1, -1, -1], [1, 2, 3, 4], 2, [1, 2, -1, -1]),
        ([-1, -1, -1], [1, -1, -1, -1], 1, [1, -1, -1, -1]),
    ],
)
def test_drafts_are_accepted_up_to_the_first_difference_inside_the_width(
    draft: list[int], tokens: list[int], width: int, gained: list[int]
) -> None:
    found = accept_matching(torch.tensor([draft]), torch.tensor([tokens]), torch.tensor([width]))
    assert found.tolist() == [gained]


def test_a_token_of_probability_zero_is_never_accepted() -> None:
    p = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    numbers = torch.zeros(1, 2, dtype=torch.float64)
    assert accept_sampled(torch.tensor([[0]]), p, torch.tensor([2]), numbers).tolist() == [[1, -1]]


def test_shapes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"draft \(1, 2\), target \(1, 2\) rows"):
        accept_matching(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1))

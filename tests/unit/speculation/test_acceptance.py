import pytest
import torch

from dflash_serve.speculation.acceptance import count_accepted
from dflash_serve.speculation.noise import draw


@pytest.mark.parametrize(
    ("draft", "tokens", "most", "accepted"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 3),
        ([1, 2, 3], [1, 5, 3, 4], 3, 1),
        ([1, 2, 3], [7, 2, 3, 4], 3, 0),
        ([1, 2, 3], [1, 2, 3, 4], 1, 1),
        ([1, -1, -1], [1, 2, 3, 4], 1, 1),
        ([-1, -1, -1], [1, -1, -1, -1], 0, 0),
        ([-1, -1, -1], [-1, -1, -1, -1], 0, 0),
        ([], [1], 0, 0),
    ],
)
def test_drafts_are_accepted_up_to_the_first_difference_inside_the_width(
    draft: list[int], tokens: list[int], most: int, accepted: int
) -> None:
    given = torch.tensor([draft], dtype=torch.int64), torch.tensor([tokens]), torch.tensor([most])
    assert count_accepted(*given).tolist() == [accepted]


def test_a_token_of_probability_zero_is_never_accepted() -> None:
    p = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    tokens = draw(p, torch.zeros(1, 2, dtype=torch.float64))
    assert tokens[0, 0].item() == 1
    assert count_accepted(torch.tensor([[0]]), tokens, torch.tensor([1])).tolist() == [0]

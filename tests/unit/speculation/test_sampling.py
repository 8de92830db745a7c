import pytest
import torch

from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.sampling import (
    SamplingBatch,
    TokenCounts,
    adjust_logits,
    greedy_tokens,
    keep_top_p,
    probabilities,
)

NONE = torch.empty(1, 0, dtype=torch.int64)
LOGITS = torch.tensor([[[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]]).log()


def sample_from(**params: object) -> list[float]:
    batch = SamplingBatch.of([SamplingParams.model_validate(params)], 4)
    return [round(p, 4) for p in probabilities(LOGITS, batch)[0, 0].tolist()]


def test_each_switch_does_what_its_name_says() -> None:
    assert sample_from() == [0.5, 0.3, 0.15, 0.05]
    assert sample_from(temperature=0) == [1, 0, 0, 0]
    assert sample_from(temperature=0.5) == [0.6849, 0.2466, 0.0616, 0.0068]
    assert sample_from(top_k=2) == [0.625, 0.375, 0, 0]
    assert sample_from(top_p=0.75) == [0.625, 0.375, 0, 0]
    assert sample_from(top_p=0.01) == [1, 0, 0, 0]
    assert sample_from(min_p=0.4) == [0.625, 0.375, 0, 0]
    assert sample_from(logit_bias={0: -100}) == [0, 0.6, 0.3, 0.1]


def test_min_p_and_top_p_look_at_the_distribution_after_temperature_and_top_k() -> None:
    assert sample_from(temperature=0.5, min_p=0.4) == [1, 0, 0, 0]  # 0.3/0.5 = 0.6 before temperature, 0.36 after
    assert sample_from(top_k=2, top_p=0.62) == [1, 0, 0, 0]  # 0.5 before top_k, 0.625 after


def test_equal_tokens_at_the_edge_of_top_p_stay_together() -> None:
    kept = keep_top_p(torch.tensor([[[0.0, 1.0, 0.0, -1.0]]]), torch.tensor([0.6]))
    assert kept.isfinite().tolist() == [[[True, True, True, False]]]


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_a_nucleus_may_be_larger_than_usual(spread: float) -> None:
    logits = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(0)) * spread
    kept = keep_top_p(logits, torch.tensor([0.9, 0.3])).isfinite()
    p = logits.double().softmax(-1)
    mass, smallest = (p * kept).sum(-1), p.masked_fill(~kept, 1).amin(-1)
    needed = torch.tensor([[0.9], [0.3]])
    assert (mass >= needed - 1e-5).all()
    assert (mass - smallest < needed + 1e-5).all()
    assert (p.masked_fill(kept, 0).amax(-1) < smallest).all()


def test_parameters_stay_with_their_request() -> None:
    params = [SamplingParams(top_k=1), SamplingParams(temperature=0), SamplingParams(), SamplingParams(min_p=0.9)]
    together = probabilities(LOGITS.expand(4, 2, 4), SamplingBatch.of(params, 4))
    for i, one in enumerate(params):
        assert torch.equal(together[i], probabilities(LOGITS, SamplingBatch.of([one], 4))[0])


def test_what_is_switched_off_is_not_computed() -> None:
    batch = SamplingBatch.of([SamplingParams(temperature=0)], 4)
    logits = LOGITS.bfloat16()
    assert adjust_logits(logits, batch) is logits
    assert greedy_tokens(logits, batch).tolist() == [[0, 3]]


def test_bias_and_penalties_move_the_greedy_choice_too_and_leave_the_logits_alone() -> None:
    logits, untouched = LOGITS.clone(), LOGITS.clone()
    batch = SamplingBatch.of([SamplingParams(temperature=0, logit_bias={2: 5}, presence_penalty=2)], 4)
    counts = TokenCounts.of(NONE, NONE, 4)
    assert greedy_tokens(logits, batch, counts, torch.tensor([[2]])).tolist() == [[2, 2]]
    batch = SamplingBatch.of([SamplingParams(temperature=0, presence_penalty=2)], 4)
    assert greedy_tokens(logits, batch, counts, torch.tensor([[3]])).tolist() == [[0, 2]]
    assert torch.equal(logits, untouched)


def test_bias_comes_before_penalties() -> None:
    batch = SamplingBatch.of([SamplingParams(logit_bias={0: 3}, repetition_penalty=2)], 4)
    got = adjust_logits(torch.full((1, 1, 4), -1.0), batch, TokenCounts.of(torch.tensor([[0]]), NONE, 4), NONE)
    assert got[0, 0].tolist() == [1, -1, -1, -1]  # (-1 + 3) / 2

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.sampling import SamplingBatch, TokenCounts, apply_penalties

V = 6
tokens = st.integers(0, V - 1)
strengths = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
)


def one_by_one(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        result.append(
            logit - params.frequency_penalty * output.count(token) - params.presence_penalty * (token in output)
        )
    return result


def padded(rows: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows], dtype=torch.int64)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.lists(tokens, max_size=4), st.lists(tokens, max_size=6), st.lists(tokens, min_size=4, max_size=4),
                  strengths), min_size=1, max_size=3,
    ),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_penalties_inside_a_block_are_those_of_decoding_token_by_token(
    requests: list[tuple[list[int], list[int], list[int], SamplingParams]], seed: int
) -> None:
    prompts, outputs, drafts, params = map(list, zip(*requests, strict=True))
    logits = torch.randn(len(requests), 5, V, generator=torch.Generator().manual_seed(seed))
    untouched = logits.clone()
    counts = TokenCounts.of(padded(prompts), padded(outputs), V)
    got = apply_penalties(logits, SamplingBatch.of(params, V), counts, torch.tensor(drafts))
    want = [
        [one_by_one(logits[i, j].tolist(), prompts[i], outputs[i] + drafts[i][:j], params[i]) for j in range(5)]
        for i in range(len(requests))
    ]
    torch.testing.assert_close(got, torch.tensor(want))
    assert torch.equal(logits, untouched)


def test_strengths_that_are_off_leave_every_bit_as_it_was() -> None:
    logits = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(0))
    logits[0, :, 2] = float("-inf")
    batch = SamplingBatch.of([SamplingParams(), SamplingParams(repetition_penalty=2)], V)
    draft = torch.tensor([[1, 1], [1, 1]])
    got = apply_penalties(logits, batch, TokenCounts.of(torch.tensor([[0], [0]]), draft[:, :1], V), draft)
    assert torch.equal(got[0], logits[0])
    assert not torch.equal(got[1], logits[1])


def test_padding_of_the_draft_counts_nowhere() -> None:
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(0))
    batch, counts = (
        SamplingBatch.of([SamplingParams(presence_penalty=1)], V),
        TokenCounts.of(padded([[]]), padded([[3]]), V),
    )
    wide = apply_penalties(logits, batch, counts, torch.tensor([[2, -1, -1]]))
    narrow = apply_penalties(logits[:, :2], batch, counts, torch.tensor([[2]]))
    assert torch.equal(wide[:, :2], narrow)


def test_tokens_are_counted_and_padding_is_not() -> None:
    counts = TokenCounts.of(padded([[5], [5]]), torch.tensor([[1, 1, 2, -1], [0, -1, -1, -1]]), V)
    assert counts.in_output.tolist() == [[0, 2, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert counts.in_prompt.nonzero().tolist() == [[0, 5], [1, 5]]

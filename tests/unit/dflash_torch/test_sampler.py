"""Tokens of a step: the short path for greedy batches against the general path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.speculation.params import SamplingParams
from dflash_torch.model_runner import Fetched
from dflash_torch.request import LaunchedStep, Part, Request, StepResult
from dflash_torch.sampler import Sampler

VOCAB = 11
WIDTHS = (4, 1, 3)


def request(**params: Any) -> Request:
    return Request(
        id=0,
        entry=0,
        token_ids=[1, 2, 3],
        prompt_length=2,
        limit=100,
        params=SamplingParams(temperature=0, **params),
    )


def results(sample: Sampler, requests: list[Request], drafts: list[list[int]], logits: Tensor) -> list[StepResult]:
    rows = zip(requests, logits.split([1 + len(draft) for draft in drafts]), strict=True)
    parts = [Part(request, len(raw), logits=raw) for request, raw in rows]
    step = LaunchedStep(parts, Fetched(sample(requests, drafts, logits, [0])))
    return [StepResult.of(*each) for each in zip(parts, step.gained(), strict=True)]


@pytest.mark.parametrize("right", [(0, 0, 0), (2, 0, 1), (3, 0, 2)], ids=str)
def test_the_short_way_gives_what_the_general_one_does(right: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(sum(right))
    logits = torch.randn(sum(WIDTHS), VOCAB)
    drafts, first = [], 0
    for width, accepted in zip(WIDTHS, right, strict=True):
        best = logits[first : first + width - 1].argmax(-1)
        drafts.append([int(token) if slot < accepted else (int(token) + 1) % VOCAB for slot, token in enumerate(best)])
        first += width
    requests = [request(), request(logprobs=2), request(min_tokens=1)]
    sample = Sampler()
    short = results(sample, requests, drafts, logits)
    monkeypatch.setattr(Request, "unconstrained", False)
    assert short == results(sample, requests, drafts, logits)
    assert [len(result.token_ids) - 1 for result in short] == list(right)
    assert short[1].logprobs is not None


def test_parameters_are_collated_anew_when_the_batch_changes() -> None:
    sample, logits = Sampler(), torch.zeros(2, VOCAB)
    biased, other = request(logit_bias={3: 5.0}), request(logit_bias={4: 5.0})

    def tokens(*requests: Request) -> list[int]:
        return sample(requests, [[]] * len(requests), logits[: len(requests)], [0])[:, 0].tolist()

    assert tokens(biased, other) == tokens(biased, other) == [3, 4]
    assert [tokens(other, biased), tokens(biased), tokens(other)] == [[4, 3], [3], [4]]

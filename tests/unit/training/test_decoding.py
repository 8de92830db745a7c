"""Batch decoding writes what the target would write alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.models.kv_cache import Span
from dflash_serve.models.loader import load_target
from dflash_serve.models.target import TargetModel
from dflash_serve.training.dataset import target_features
from dflash_serve.training.decoding import BatchDecoder, Completion, Request
from dflash_torch.model_runner import TargetRunner
from tests.support.tiny_target import EOS

PROMPTS = [[5, 6, 7], [9], [30, 31, 32, 33, 34, 35, 36], [12, 13], [60, 61, 62, 63], [7] * 9, [80, 90, 100]]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> TargetModel:
    return load_target(str(tiny_target_folder))


def alone(target: TargetModel, prompt: list[int], limit: int) -> list[int]:
    """Greedy decoding without a cache: everything anew for every token."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < limit and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        forward = TargetRunner(target, target.new_cache(1, 64), widest=1)
        with torch.no_grad():
            hidden = forward([tokens], [Span(0, 0, len(tokens))], ()).hidden
            tokens.append(int(target.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def decode(
    target: TargetModel, *, size: int, temperature: float = 0.0, seed: int = 0, limit: int = 12, padded: bool = False
) -> list[Completion]:
    decoder = BatchDecoder(target, max_batch_size=size, capacity=40, max_new_tokens=limit, stop_ids=[EOS], seed=seed)
    decoder.compiled = decoder.compiled and not padded
    requests = (Request(i, tuple(p), temperature) for i, p in enumerate(PROMPTS))
    return sorted(decoder.decode(requests), key=lambda c: c.request.index)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_greedy_answers_are_those_of_the_target_alone(target: TargetModel, size: int, padded: bool) -> None:
    answers = [completion.tokens for completion in decode(target, size=size, padded=padded)]
    assert answers == [alone(target, prompt, 12) for prompt in PROMPTS]


def test_every_answer_keeps_to_the_limit_and_says_how_it_ended(target: TargetModel) -> None:
    for completion in decode(target, size=3, limit=5):
        assert len(completion.tokens) <= 5
        assert completion.ended == (completion.tokens[-1] == EOS)


def test_sampling_follows_the_seed(target: TargetModel) -> None:
    first, same, other = ([c.tokens for c in decode(target, size=4, temperature=1.0, seed=s)] for s in (1, 1, 2))
    assert first == same != other


def test_an_answer_that_loops_is_cut(target: TargetModel) -> None:
    decoder = BatchDecoder(target, max_batch_size=1, capacity=80, max_new_tokens=64, stop_ids=[], seed=0)
    decoder.active[0] = completion = Completion(Request(0, (5,)), [11, 12, *[1, 2, 3] * 10])
    assert decoder._is_done(completion)
    assert completion.looped
    assert completion.tokens == [11, 12, *[1, 2, 3] * 8]


def test_features_of_packed_sequences_are_those_of_each_alone(target: TargetModel) -> None:
    sequences = [torch.tensor(prompt) for prompt in PROMPTS]
    for tokens, features in zip(sequences, target_features(target, sequences, (0, 2)), strict=True):
        with torch.no_grad():
            forward = TargetRunner(target, target.new_cache(1, 64), widest=1)
            expected = forward([tokens.tolist()], [Span(0, 0, len(tokens))], (0, 2)).features
        assert expected is not None
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)


def test_features_kept_while_decoding_are_those_of_the_whole_answer(target: TargetModel) -> None:
    decoder = BatchDecoder(
        target, max_batch_size=3, capacity=40, max_new_tokens=12, stop_ids=[EOS], seed=0, layer_ids=(0, 2)
    )
    for completion in decoder.decode(Request(i, tuple(p)) for i, p in enumerate(PROMPTS)):
        read = torch.tensor([*completion.request.prompt, *completion.tokens[:-1]])
        assert completion.features is not None
        torch.testing.assert_close(
            completion.features, target_features(target, [read], (0, 2))[0], atol=1e-5, rtol=1e-4
        )

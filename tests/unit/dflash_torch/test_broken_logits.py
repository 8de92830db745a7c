"""A request whose logits are NaN or infinite ends with an error and without a made-up token; others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dflash_serve import SamplingParams
from dflash_serve.errors import UserError
from dflash_torch.engine import EmbeddedEngine
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes

Folders = tuple[Path, Path]
Truth = dict[tuple[int, ...], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
POISON = 97
"""A token that no prompt or answer of these tests has, and no draft: `OracleSpeculator` spoils with smaller ones."""
WAYS = {
    "the likeliest": GREEDY,
    "penalised": GREEDY.model_copy(update={"presence_penalty": 0.1}),
    "drawn": GREEDY.model_copy(update={"temperature": 1.0, "seed": 1}),
    "truncated": GREEDY.model_copy(update={"temperature": 1.0, "seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01}),
    "with logprobs": GREEDY.model_copy(update={"logprobs": 2}),
}


@pytest.fixture(autouse=True)
def poison_is_foreign(truth: Truth) -> None:
    assert all(POISON not in (*prompt, *answer) for prompt, answer in truth.items())


@contextmanager
def poisoned(engine: EmbeddedEngine, value: float = float("nan")) -> Iterator[None]:
    """Gives the engine a token that spoils each row that sees it."""
    embedding = engine.scheduler.target.embedding
    with torch.no_grad():
        before = embedding[POISON].clone()
        embedding[POISON] = value
        yield
        embedding[POISON] = before


@pytest.mark.parametrize(("width", "value"), [(1, float("nan")), (4, float("inf"))])
@pytest.mark.parametrize("way", WAYS)
def test_a_request_of_broken_logits_fails_and_the_others_go_on(
    folders: Folders, truth: Truth, way: str, width: int, value: float
) -> None:
    engine = tiny_engine(folders, width=width, truth=truth)
    sound = list(zip(truth, truth.values(), strict=True))
    prompts = [list(sound[0][0]), [5, POISON, 6], list(sound[1][0])]
    stream = engine.stream(prompts, [GREEDY, WAYS[way], GREEDY])
    with poisoned(engine, value), pytest.raises(UserError, match="prompt 1: the target's logits are NaN or infinite"):
        list(stream)
    assert [output.token_ids for output in stream.outputs()] == [sound[0][1], sound[1][1]]
    assert len(engine.scheduler.free_entries) == engine.scheduler.cache.entries


@pytest.mark.parametrize("static", [False, True], ids=["ragged", "padded"])
def test_what_it_leaves_in_the_caches_spoils_no_later_request(folders: Folders, truth: Truth, static: bool) -> None:
    engine = with_passes(tiny_engine(folders, max_batch_size=1), static=static)
    for prompt in PROMPTS[:3]:
        with poisoned(engine), pytest.raises(UserError, match="NaN or infinite"):
            answers(engine, [[5, POISON] + [6] * 60], GREEDY)
        assert not engine.scheduler.cache_manager.holds  # a prefix with broken rows is not lent
        (output,) = answers(engine, [prompt], GREEDY)
        assert output.token_ids == truth[tuple(output.prompt_token_ids)]

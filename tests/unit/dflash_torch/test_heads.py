"""With any head of the drafter and any width, answers are those without speculation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_serve import SamplingParams
from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.writer import write_drafter
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.grammar import Grammars
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes
from tests.support.heads import HEADS
from tests.support.tiny import random_tensors, tiny_drafter_config
from tests.support.tiny_target import EOS

Truth = dict[tuple[int, ...], list[int]]
BLOCK = 5
WIDTHS = range(2, BLOCK + 1)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=16, frequency_penalty=0.3),
    SamplingParams(temperature=1.3, top_k=20, seed=6, max_tokens=16, repetition_penalty=1.3, presence_penalty=0.5),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
Fit = Callable[[DrafterConfig, dict[str, Tensor]], dict[str, Tensor]]


def pair_with(
    folders: tuple[Path, Path], folder: Path, heads: Mapping[str, object], fit: Fit = lambda _, tensors: tensors
) -> tuple[Path, Path]:
    """The tiny target and a random drafter with such heads; `fit` may change its weights."""
    vocab_size = json.loads((folders[0] / "config.json").read_text())["vocab_size"]
    config = tiny_drafter_config(
        block_size=BLOCK, num_target_layers=4, target_layer_ids=(0, 2), mask_token_id=3, vocab_size=vocab_size, **heads
    )
    dialect = "speculators" if config.draft_vocabulary else "modelopt"
    write_drafter(folder, config, fit(config, random_tensors(config)), dialect=dialect)
    return folders[0], folder


@pytest.fixture(scope="module")
def sampled(folders: tuple[Path, Path]) -> list[list[list[int]]]:
    """Without speculation, one prompt at a time."""
    engine = tiny_engine(folders, width=1, reuse_prefixes=False)
    return [[answers(engine, [prompt], params)[0].token_ids for prompt in PROMPTS] for params in SAMPLED]


@pytest.mark.parametrize("name", HEADS)
def test_answers_do_not_depend_on_head_or_width(
    name: str, folders: tuple[Path, Path], truth: Truth, sampled: list[list[list[int]]], tmp_path: Path
) -> None:
    pair = pair_with(folders, tmp_path / "drafter", HEADS[name])
    greedy = [tokens[:24] for tokens in truth.values()]
    for width in WIDTHS:
        own = answers(tiny_engine(pair, width=width, max_batch_size=3), PROMPTS, GREEDY)
        engine = tiny_engine(pair, width=width, max_batch_size=2, truth=truth)
        helped = answers(engine, PROMPTS, GREEDY)
        assert [output.token_ids for output in own] == [output.token_ids for output in helped] == greedy
        assert max(output.statistics.tokens_per_step or 0 for output in helped) > 1.3
        for params, expected in zip(SAMPLED, sampled, strict=True):
            assert [output.token_ids for output in answers(engine, PROMPTS, params)] == expected


def constrained(engine: EmbeddedEngine, grammars: Grammars, temperature: float) -> tuple[list[int], int]:
    """The tokens of an answer that must be JSON, and its steps."""
    params = SamplingParams(temperature=temperature, seed=3, ignore_eos=True, max_tokens=200)
    request = engine.scheduler.join([5, 6, 7], params, grammar=grammars.json_schema(SCHEMA))
    steps = 0
    while engine.scheduler.running:
        engine.scheduler.step()
        steps += 1
    assert request.finish_reason == "stop"
    return request.output_ids, steps


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> EmbeddedEngine:
    return tiny_engine(folders, width=1, reuse_prefixes=False)


@pytest.fixture(scope="module")
def grammars(plain: EmbeddedEngine) -> Grammars:
    return Grammars(plain.tokenizer, plain.scheduler.target.config.vocab_size, [EOS])


@pytest.mark.parametrize("name", HEADS)
def test_a_grammar_filters_every_head_slot_by_slot(
    name: str, plain: EmbeddedEngine, grammars: Grammars, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    pair = pair_with(folders, tmp_path / "drafter", HEADS[name])
    engines = {width: tiny_engine(pair, width=width) for width in WIDTHS}
    for temperature in (0.0, 1.5):
        expected, without = constrained(plain, grammars, temperature)
        for width, engine in engines.items():
            tokens, steps = constrained(engine, grammars, temperature)
            assert tokens == expected
            if width == BLOCK and "reduced" not in name:  # which may hold none of the forced tokens
                assert steps < without  # forced parts are accepted whole


def taught(truth: Truth) -> Fit:
    """Gives the Markov head the answers' own bigrams."""

    def fit(config: DrafterConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        w1 = tensors["markov_head.markov_w1.weight"]
        follows = torch.zeros(config.vocab_size, config.vocab_size)
        for prompt, tokens in truth.items():
            for before, after in zip([prompt[-1], *tokens], tokens, strict=False):
                follows[before, after] += 1000.0
        return {**tensors, "markov_head.markov_w2.weight": torch.linalg.pinv(w1).matmul(follows).T.contiguous()}

    return fit


@pytest.mark.parametrize("slots", ["anchor-first", "fill-in"])
def test_a_markov_head_that_knows_the_answers_is_accepted_and_changes_nothing(
    slots: str, folders: tuple[Path, Path], truth: Truth, tmp_path: Path
) -> None:
    heads: dict[str, object] = {"markov": {"kind": "vanilla", "rank": 400}, "slots": slots}
    pair = pair_with(folders, tmp_path / "drafter", heads, taught(truth))
    for static in (False, True):
        engine = with_passes(tiny_engine(pair, width=BLOCK), static=static)
        outputs = answers(engine, PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == [tokens[:24] for tokens in truth.values()]
        assert (engine.scheduler.statistics.acceptance_length or 0) > 1.5

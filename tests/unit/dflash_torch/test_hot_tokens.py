"""A drafter that drafts a part of the vocabulary by the target's own head: other drafts, never another answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dflash_serve import SamplingParams
from dflash_serve.checkpoint.source import HOT_TOKENS
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import HotHead, read_hot_tokens, write_hot_tokens
from dflash_serve.models.layers import pack_linear
from dflash_serve.models.loader import load_drafter
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.faults.kinds import drafter_faults
from dflash_torch.faults.tensors import first_difference
from dflash_torch.grammar import Grammars
from dflash_torch.request import Request
from tests.support.embedded import PROMPTS, answers, tiny_engine
from tests.support.heads import HEADS
from tests.support.tiny_target import EOS

from .test_heads import pair_with

Folders = tuple[Path, Path]
PART = list(range(1, 60, 2))
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def with_hot_tokens(folders: Folders, folder: Path, token_ids: list[int]) -> Folders:
    shutil.copytree(folders[1], folder)
    write_hot_tokens(folder, token_ids)
    return folders[0], folder


@pytest.fixture(scope="module", params=["plain", "vanilla Markov", "rnn Markov"])
def pair(request: pytest.FixtureRequest, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A drafter without a head, and with one that chooses from left to right."""
    return pair_with(folders, tmp_path_factory.mktemp("pair") / "drafter", HEADS[request.param])


def drafts(engine: EmbeddedEngine, grammar: str | None = None) -> list[list[int]]:
    """What is drafted of one answer, step by step."""
    found: list[list[int]] = []
    speculator = engine.scheduler.speculator
    assert speculator is not None
    draft = speculator.draft

    def watched(requests: list[Request], widths: list[int]) -> list[list[int]]:
        (tokens,) = draft(requests, widths)
        found.append(tokens)
        return [tokens]

    speculator.draft = watched  # type: ignore[method-assign,assignment]
    vocab = engine.scheduler.target.config.vocab_size
    rule = Grammars(engine.tokenizer, vocab, [EOS]).regex(grammar) if grammar else None
    engine.scheduler.join(engine.tokenize(PROMPTS[0]), GREEDY.model_copy(update={"ignore_eos": False}), grammar=rule)
    while engine.scheduler.running:
        engine.scheduler.step()
    return found


def test_what_is_drafted_is_hot_and_no_answer_changes(pair: Folders, tmp_path: Path) -> None:
    hot = tiny_engine(with_hot_tokens(pair, tmp_path / "hot", PART))
    given, plain = answers(hot, PROMPTS, GREEDY), answers(tiny_engine(pair, width=1), PROMPTS, GREEDY)
    assert [output.token_ids for output in given] == [output.token_ids for output in plain]
    found = drafts(hot)
    assert found
    assert {token for draft in found for token in draft} <= set(PART)


def test_with_every_token_hot_and_under_a_grammar_drafts_are_those_of_the_whole_head(
    pair: Folders, tmp_path: Path
) -> None:
    whole = tiny_engine(pair)
    every = list(range(whole.scheduler.target.config.vocab_size))
    assert drafts(tiny_engine(with_hot_tokens(pair, tmp_path / "every", every))) == drafts(whole)
    pattern = r"[a-f]{3,9}-(fox|dog)\."
    hot = tiny_engine(with_hot_tokens(pair, tmp_path / "hot", PART))
    assert drafts(hot, pattern) == drafts(tiny_engine(pair), pattern)


def test_it_differs_nowhere_from_the_reference_and_its_faults_are_its_own(pair: Folders, tmp_path: Path) -> None:
    hot = with_hot_tokens(pair, tmp_path / "hot", PART)
    engine = tiny_engine(hot)
    assert first_difference(engine, *hot, PROMPTS[0]) is None
    speculator = engine.scheduler.speculator
    assert speculator is not None
    (fault,) = [fault for fault in drafter_faults(speculator) if fault.cause == "quantised head"]
    changed = fault.change(speculator).hot_head
    assert changed is not None
    assert speculator.hot_head is not None
    assert changed.token_ids.tolist() == speculator.hot_head.token_ids.tolist() == PART
    x = torch.ones(1, 32)
    assert not torch.equal(changed(x), speculator.hot_head(x))


@pytest.mark.parametrize("packed", [False, True])
def test_the_rows_are_the_heads_own(packed: bool) -> None:
    head = nn.Linear(64, 40, bias=False).requires_grad_(False)
    x, expected = torch.randn(3, 64), head.weight[[2, 5, 39]].clone()
    made = HotHead(pack_linear(head) if packed else head, [2, 5, 39])
    torch.testing.assert_close(made(x), x @ expected.T, rtol=0.02, atol=0.02)  # rounded to bfloat16 where packed


@pytest.mark.parametrize("text", ["", "{}", "[]", "[3, 2]", "[1, 1]", "[-1, 2]", "[5, 96]", "[1.5]", '["1"]', "[1"])
def test_a_list_that_makes_no_sense_is_refused(folders: Folders, tmp_path: Path, text: str) -> None:
    _, folder = with_hot_tokens(folders, tmp_path / "hot", PART)
    assert load_drafter(folder).hot_tokens == PART
    (folder / HOT_TOKENS).write_text(text)
    with pytest.raises(UserError, match="no rising list of token ids below 96; remove it") as error:
        read_hot_tokens(folder, 96)
    assert "\n" not in str(error.value)
    (folder / HOT_TOKENS).unlink()
    assert load_drafter(folder).hot_tokens is None

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dflash_serve.models.loader import load_tokenizer
from dflash_torch.detokenizer import Detokenizer

ALPHABET = "abé漢🦊 \n"
LETTERS, STOP = st.text(ALPHABET, max_size=30), st.text(ALPHABET, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def tokenizer(folders: tuple[Path, Path]) -> Tokenizer:
    tokenizer: Tokenizer = load_tokenizer(str(folders[0])).backend_tokenizer
    return tokenizer


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted(min(cut, len(tokens)) for cut in cuts)
    return [tokens[a:b] for a, b in zip([0, *edges], [*edges, len(tokens)], strict=True)]


@settings(deadline=None)
@given(
    text=LETTERS,
    stops=st.lists(st.text("abé漢🦊 \n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 60)),
)
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int]
) -> None:
    stream, said = Detokenizer(tokenizer, stops), []
    for tokens in pieces(tokenizer.encode(text).ids, cuts):
        said.append(stream.feed(tokens))
        for stop in stops:  # nothing is said that has to be taken back
            assert stop not in "".join(said)
    whole = "".join(said) + stream.flush()
    found = [text.index(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(found)
    if not found:
        assert whole == text
    else:  # where two stop strings overlap, the one that is complete first counts
        assert text.startswith(whole)
        assert any(text.startswith(whole + stop) for stop in stops)


@settings(deadline=None)
@given(text=LETTERS, cuts=st.lists(st.integers(0, 60)))
def test_tokens_behind_the_stop_string_are_not_counted_whatever_the_steps(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    tokens = tokenizer.encode(text + "STOP" + text).ids
    fed = []
    for steps in (pieces(tokens, cuts), [[token] for token in tokens]):
        stream = Detokenizer(tokenizer, ["STOP"])
        for step in steps:
            stream.feed(step)
        fed.append(stream.fed)
    assert fed[0] == fed[1]

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel

from dflash_serve.models.loader import load_tokenizer
from dflash_torch.answer import Detokenizer

ALPHABET = "abé漢🦊 \n"


@pytest.fixture(scope="module")
def tokenizer(folders: tuple[Path, Path]) -> Tokenizer:
    tokenizer: Tokenizer = load_tokenizer(str(folders[0])).backend_tokenizer
    return tokenizer


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted(min(cut, len(tokens)) for cut in cuts)
    return [tokens[a:b] for a, b in zip([0, *edges], [*edges, len(tokens)], strict=True)]


@settings(deadline=None)
@given(
    text=st.text(ALPHABET, max_size=60),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 60)),
)
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokens_of_text = tokenizer.encode(text).ids
    stream, said = Detokenizer(tokenizer, stop=stops), []
    for tokens in pieces(tokens_of_text, cuts):
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
    one_by_one = Detokenizer(tokenizer, stop=stops)
    for token in tokens_of_text:
        one_by_one.feed([token])
    assert stream.fed == one_by_one.fed  # tokens behind the stop string are not counted, whatever the steps


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As Llama-2's: a space before a word is a part of it, and a byte that is no token's stands for itself."""
    words = ["<unk>", "\u2581is", "\u2581Paris", "\u2581now", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def test_bytes_that_are_no_character_end_no_answer(sentencepiece: Tokenizer) -> None:
    stray = [4 + 0xF0, 4 + 0x9F, 4 + 0x98, 4 + 0x80, 4 + 0xF0, 2, 3]
    stream = Detokenizer(sentencepiece)
    said = "".join(stream.feed([token]) for token in stray)
    assert said.startswith("\U0001f600")
    assert said.endswith("Paris now")


def test_an_answer_goes_on_from_its_prompt(sentencepiece: Tokenizer) -> None:
    stream = Detokenizer(sentencepiece, [1])
    assert stream.feed([2]) + stream.feed([3]) == " Paris now"
    assert sentencepiece.decode([1, 2, 3]) == "is Paris now"


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "left"),
    [
        ("abcd", "bc", 2, "a"),  # begins within the first two tokens, ends behind them
        ("abcbc", "bc", 3, "abc"),  # the first one ends within them
        ("abcd", "abcd", 4, "abcd"),
        ("abab", "ab", 2, "ab"),
    ],
)
def test_a_stop_string_counts_where_it_ends_behind_min_tokens(text: str, stop: str, min_tokens: int, left: str) -> None:
    letters = Tokenizer(WordLevel({letter: n for n, letter in enumerate("abcd")}, unk_token="a"))
    letters.decoder = decoders.Fuse()
    stream = Detokenizer(letters, stop=[stop, "no such longer string"], min_tokens=min_tokens)
    assert "".join([stream.feed(["abcd".index(letter)]) for letter in text]) + stream.flush() == left

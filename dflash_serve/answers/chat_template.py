"""Prompts as token ids: plain text, and conversations by the target's own chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, meta
from jinja2.ext import loopcontrols

from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEVELOPER = "developer"  # OpenAI's later name of the role `system`, which most templates do not know


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
        special: with the tokens that the tokenizer adds, such as the beginning of a sequence.

    Raises:
        UserError: the text has half a surrogate pair, which is no character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text[error.start]!r} is half a surrogate pair, and no character", where="prompt") from None
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def render_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The text of chat messages, by the target's own template; it is encoded without special tokens.

    A template may leave out a message without an error. Such a message is an error here; only one of role `developer`
    becomes one of role `system` first, as OpenAI's API treats the two alike. What a message would lose is found by
    rendering it a second time with marks in the place of its text and its calls.

    Args:
        variables: further variables of the template, such as `tools`.

    Raises:
        UserError: the target has no template, it refuses the messages, it leaves out one of them, or it does not read
            one of the variables.
    """
    source, ours = template_of(tokenizer), {*inspect.signature(tokenizer.apply_chat_template).parameters} - {"tools"}
    ours |= {*tokenizer.special_tokens_map, "messages"}
    read = meta.find_undeclared_variables(Environment(extensions=[loopcontrols]).parse(source)) if variables else {}  # noqa: S701
    for name in variables:
        if name in ours or (name != "tools" and name not in read):
            where = name if name == "reasoning_effort" else "chat_template_kwargs"
            raise UserError(f"the target's chat template does not read {name!r}", where=where, do="leave it out")
    if not all(isinstance(message, Mapping) for message in messages):
        raise TypeError("a message is a mapping")
    render = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False, **variables)
    if any(message.get("role") == DEVELOPER for message in messages) and not _writes_developers(render):
        messages = [{**one, "role": "system"} if one.get("role") == DEVELOPER else one for one in messages]
    try:
        text = str(render(list(messages)))
    except Exception as error:  # templates raise exceptions of any class
        raise UserError(f"the target's chat template refuses them ({error})", where="messages") from None
    _refuse_lost(messages, render)
    return text


def _writes_developers(render: Callable[..., object]) -> bool:
    probe = [{"role": DEVELOPER, "content": _mark(0)}, {"role": "user", "content": "."}]
    try:
        return _mark(0) in str(render(probe))
    except Exception:  # it refuses the role
        return False


def _refuse_lost(messages: Sequence[Mapping[str, Any]], render: Callable[..., object]) -> None:
    marks = map(_mark, count())
    marked, expected = [], list[tuple[int, str, str]]()  # number of the message, its lost part, mark
    for number, message in enumerate(messages):
        copy, told = dict(message), message.get("content")
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            # Some templates leave out, on purpose, the text before calls that have been answered (gpt-oss).
            functions = [{"name": next(marks), "arguments": {next(marks): ""}} for _ in calls]
            copy["tool_calls"] = [{**call, "function": made} for call, made in zip(calls, functions, strict=True)]
            names = [mark for made in functions for mark in (made["name"], *made["arguments"])]
            expected += [(number, "the calls", str(mark)) for mark in names]
        elif isinstance(told, str) and told.strip():
            copy["content"] = next(marks)
            expected.append((number, "the text", copy["content"]))
        marked.append(copy)
    try:
        text = str(render(marked))
    except Exception:  # it took the messages themselves, and looks into a text or a call
        return
    for number, part, mark in expected:
        if mark not in text:
            what = f"the target's chat template leaves out {part} of this message (role {messages[number]['role']!r})"
            raise UserError(what, where=f"messages.{number}", do="send it in another role")


def _mark(number: int) -> str:  # letters and digits, which no template escapes, trims or splits
    return f"dflash0mark{number}end"


def template_of(tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None) -> str:
    """The target's chat template, without the tag that only transformers knows; empty where it has none.

    Args:
        tools: given = the template for conversations with tools, where the target has one of its own for them.
    """
    try:
        source = str(tokenizer.get_chat_template(tools=tools))
    except ValueError:
        return ""
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)

"""Prompts as token ids: plain text, and conversations by the target's own chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, meta
from jinja2.ext import loopcontrols

from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    Args:
        variables: further variables of the template, such as `tools`.

    Raises:
        UserError: the target has no template, it refuses the messages, or it does not read one of the variables.
    """
    source, ours = template_of(tokenizer), {*inspect.signature(tokenizer.apply_chat_template).parameters} - {"tools"}
    ours |= {*tokenizer.special_tokens_map, "messages"}
    read = meta.find_undeclared_variables(Environment(extensions=[loopcontrols]).parse(source)) if variables else {}  # noqa: S701
    for name in variables:
        if name in ours or (name != "tools" and name not in read):
            where = name if name == "reasoning_effort" else "chat_template_kwargs"
            raise UserError(f"the target's chat template does not read {name!r}", where=where, do="leave it out")
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **variables)
        )
    except Exception as error:  # templates raise exceptions of any class
        raise UserError(f"the target's chat template refuses them ({error})", where="messages") from None


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

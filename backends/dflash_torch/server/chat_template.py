"""A conversation as the target's own chat template writes it: tools, and variables such as `enable_thinking`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_serve.errors import UserError

from .chat_protocol import ChatRequest
from .tools import BEGIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHER_FORMS = ("<function=", "<arg_key>")
"""In templates that write calls between BEGIN and END in another way than `tools` reads."""


def encode_chat(tokenizer: PreTrainedTokenizerBase, body: ChatRequest) -> list[int]:
    """Token ids of a request's conversation.

    Raises:
        UserError: the template refuses it, or has no place for something that the request asks for.
    """
    variables = _variables(tokenizer, body)
    if body.offered:
        _check_tools(tokenizer)
    # Where none may be called, the target is shown none: it could not know that it must not.
    tools = [tool.model_dump() for tool in body.tools] if body.offered else None
    for tool in tools or ():
        tool["function"].pop("strict")
    messages = [message.plain() for message in body.messages]
    return _encode(tokenizer, messages, tools, variables)


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> list[int]:
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=True, return_dict=True, **variables
        )
    except Exception as error:  # templates raise what they like
        raise UserError(f"the target's chat template refuses them ({error})", where="messages") from None
    return list(encoded["input_ids"])


def _variables(tokenizer: PreTrainedTokenizerBase, body: ChatRequest) -> dict[str, Any]:
    """What the template is told beside messages and tools; all of it is read by the template.

    Raises:
        UserError: it does not read it, or it is none of a client's business.
    """
    given = {name: ("chat_template_kwargs", value) for name, value in body.chat_template_kwargs.items()}
    if body.reasoning_effort is not None:
        given["reasoning_effort"] = ("reasoning_effort", body.reasoning_effort)
    if not given:
        return {}
    words = set(re.findall(r"\w+", _source(tokenizer)))
    ours = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map, "messages"}
    for name, (where, _) in given.items():
        if name in ours or name not in words:
            raise UserError(f"the target's chat template does not read {name!r}", where=where, do="leave it out")
    return {name: value for name, (_, value) in given.items()}


def _check_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    source, do = _source(tokenizer, tools=True), "leave tools out, or send tool_choice: none"
    if not re.search(r"\btools\b", source):
        raise UserError("the target's chat template has no place for tools", where="tools", do=do)
    if BEGIN not in source or any(form in source for form in OTHER_FORMS):
        what = f"the target's chat template writes calls in another form than {BEGIN}, which alone is read here"
        raise UserError(what, where="tools", do=do)
    if BEGIN in tokenizer.all_special_tokens:
        raise UserError(f"{BEGIN} is a special token of the target, which texts do not show", where="tools", do=do)


def _source(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=[{}] if tools else None))
    except ValueError:
        return ""

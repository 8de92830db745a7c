"""Conversations: the chat template that writes them, and the calls of tools in their answers.

Qwen, Hermes and their like are trained to write a call like this, and their chat templates show it:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

A grammar fixes everything but the name, which is one of the tools', and the arguments, which are JSON of that tool's
schema. Only an answer that may call nothing may have text before, between and after calls.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dflash_serve.answers.chat_template import render_messages, template_of
from dflash_serve.answers.engine import FinishReason
from dflash_serve.errors import UserError

from ..answer import could_begin
from ..grammar import WHITESPACE, checked_schema
from .api import ChatRequest, Function, json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, BETWEEN, END = "<tool_call>", '", "arguments": ', "}\n</tool_call>"
AFTER_BEGIN = '\n{"name": "'
HEAD = re.compile(re.escape(BEGIN + AFTER_BEGIN) + r'([^"]*)' + re.escape(BETWEEN))
TEXT = r"TEXT: /(.|\n)*/"
# Parts of templates that write calls between BEGIN and END in a form that is not read here.
OTHER_FORMS = ("<function=", "<arg_key>")


def render_chat(tokenizer: PreTrainedTokenizerBase, body: ChatRequest) -> str:
    """The text of a request's conversation.

    Raises:
        UserError: the template refuses it, or does not support something that the request asks for.
    """
    variables = dict(body.chat_template_kwargs)
    if "tools" in variables:
        raise UserError("tools have their own field", where="chat_template_kwargs", do="send them as tools")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.offered:
        _check_tools(tokenizer)
    # A target that may call nothing is shown no tools: it could not know that it must not call them.
    ignored: dict[str, Any] = {"cache_control": True, "function": {"strict", "cache_control"}}
    tools = [tool.model_dump(exclude=ignored) for tool in body.tools] if body.offered else None
    messages = [message.plain() for message in body.messages]
    return render_messages(tokenizer, messages, variables | ({"tools": tools} if tools else {}))


def _check_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    source, do = template_of(tokenizer, [{}]), "leave tools out, or send tool_choice: none"
    if not re.search(r"\btools\b", source):
        raise UserError("the target's chat template has no place for tools", where="tools", do=do)
    if BEGIN not in source or any(form in source for form in OTHER_FORMS):
        what = f"the target's chat template writes calls in another form than {BEGIN}, which alone is read here"
        raise UserError(what, where="tools", do=do)
    if BEGIN in tokenizer.all_special_tokens:
        raise UserError(f"{BEGIN} is a special token of the target, which texts do not show", where="tools", do=do)


def call_grammar(functions: Sequence[Function], *, forced: bool, parallel: bool) -> str:
    """The grammar of an answer that may call these functions, in llguidance's form of Lark.

    Args:
        forced: the answer consists of calls, and has at least one.
        parallel: the answer may have several calls.

    Raises:
        UserError: a schema is too large or too deep.
    """
    bodies = [f"{json.dumps(function.name + BETWEEN)} arguments_{n}" for n, function in enumerate(functions)]
    lines = [f"call_body: {json.dumps(AFTER_BEGIN)} ({' | '.join(bodies)}) {json.dumps(END)}"]
    for n, function in enumerate(functions):
        source = json.loads(checked_schema(function.parameters or {"type": "object"}, "tools"))
        schema = {**source, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        lines.append(f"arguments_{n}: %json {json.dumps(schema)}")
    if forced:
        more = ' ("\\n" call)*' if parallel else ""
        return "\n".join([f"start: call{more}", f"call: {json.dumps(BEGIN)} call_body", *lines])
    # A lazy lexeme ends with the first marker: the text after it is a call.
    called = [f"begin[lazy]: TEXT {json.dumps(BEGIN)}", "call: begin call_body", "rest: TEXT", TEXT]
    return "\n".join([f"start: call{'*' if parallel else '?'} rest", *called, *lines])


ChatFinishReason = FinishReason | Literal["tool_calls"]
CallDelta = dict[str, Any]  # OpenAI's index, id, type, function; only a call's first piece has id, type and name


@dataclass
class CallReader:
    """Reads text and calls out of one answer as its text arrives. Text that may be the start of markup is held back."""

    calls: int = 0  # number of calls that have begun
    _held: str = ""
    _inside: bool = False  # the text so far ends in a call's arguments
    _head: str = ""  # the markup before the last call's arguments
    _arguments: str = ""
    _after_call: bool = False  # only white space has come since the last call; it is no text
    _news: dict[int, CallDelta] = field(default_factory=dict)
    _text: str = ""

    def feed(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """Takes the next text of the answer; returns new plain text, and the next piece of each call that goes on.

        Args:
            last: the answer ends here; text that is held back is returned, too.
        """
        self._held, self._news, self._text = self._held + text, {}, ""
        while self._end_call() if self._inside else self._begin_call():
            pass
        marker = END if self._inside else BEGIN
        at = self._held.find(marker) if not last else -1
        safe = at if at >= 0 else len(self._held) - could_begin([marker], self._held)
        if last and self._inside and safe < len(self._held):  # whole but for its end, as after a stop string in that
            self._inside = json_object(self._arguments + self._held[:safe]) is None
            if not self._inside:
                self._news_of_call(self._held[:safe])
                self._held = ""
        safe = len(self._held) if last else safe
        self._take(self._held[:safe])
        self._held = self._held[safe:]
        return self._text, [self._news[index] for index in sorted(self._news)]

    def _begin_call(self) -> bool:
        head = HEAD.search(self._held)
        if head is None:
            return False
        self._take(self._held[: head.start()])
        self._held, self._inside, self._head, self._arguments = self._held[head.end() :], True, head[0], ""
        function = {"name": head[1], "arguments": ""}
        call = {"index": self.calls, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        self._news[self.calls] = call
        self.calls += 1
        return True

    def _end_call(self) -> bool:
        arguments, end, rest = self._held.partition(END)
        if not end:
            return False
        self._take(arguments)
        self._held, self._inside, self._after_call = rest, False, True
        return True

    def _take(self, piece: str) -> None:
        if not self._inside:
            piece = piece.lstrip() if self._after_call else piece
            self._after_call = self._after_call and not piece
            self._text += piece
        elif piece:
            self._news_of_call(piece)

    def _news_of_call(self, piece: str) -> None:
        index = self.calls - 1
        delta = self._news.setdefault(index, {"index": index, "function": {"arguments": ""}})
        delta["function"]["arguments"] += piece
        self._arguments += piece

    @property
    def unfinished(self) -> str | None:
        """Markup of the call in which the answer was cut off; None = its calls are whole."""
        return self._head + self._arguments if self._inside else None

    def finish_of(self, reason: FinishReason | None) -> ChatFinishReason | None:
        """Chat's finish_reason: `tool_calls` where an answer with calls was not cut off, by a stop string neither."""
        return "tool_calls" if reason == "stop" and self.calls and not self._inside else reason

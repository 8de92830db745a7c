"""Calls of tools: the grammar that an answer is held to, and the calls read back out of its text, piece by piece.

A call is written as Qwen, Hermes and their like are trained to write it, and as their chat templates show it:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The grammar fixes everything but the name, which is one of the tools', and the arguments, which are JSON of that tool's
schema. Text may stand before, between and after calls only where the answer is free to call nothing.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_serve.outputs import FinishReason

from ..grammar import WHITESPACE, checked_schema
from . import responses as r
from .chat_protocol import Function

BEGIN, BETWEEN, END = "<tool_call>", '", "arguments": ', "}\n</tool_call>"
AFTER_BEGIN = '\n{"name": "'
HEAD = re.compile(re.escape(BEGIN + AFTER_BEGIN) + r'([^"]*)' + re.escape(BETWEEN))
TEXT = r"TEXT: /(.|\n)*/"


def call_grammar(functions: Sequence[Function], *, forced: bool, parallel: bool) -> str:
    """The grammar of an answer that may call these, in llguidance's form of Lark.

    Args:
        forced: it must call, and says nothing else.
        parallel: it may call several times.

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
    # A lazy lexeme ends where the marker first does: from there on the text is a call.
    called = [f"begin[lazy]: TEXT {json.dumps(BEGIN)}", "call: begin call_body", "rest: TEXT", TEXT]
    return "\n".join([f"start: call{'*' if parallel else '?'} rest", *called, *lines])


@dataclass
class CallReader:
    """Text and calls of one answer, as its text arrives; text that may yet turn out to be markup is held back."""

    calls: int = 0
    """How many have begun."""
    _held: str = ""
    _inside: bool = False
    """In a call's arguments."""
    _after_call: bool = False
    """Only line breaks have come since the last call, which set it apart and are no text."""
    _news: dict[int, r.CallDelta] = field(default_factory=dict)
    _text: str = ""

    def feed(self, text: str, *, last: bool) -> tuple[str, list[r.CallDelta]]:
        """What is new: plain text, and for each call that goes on its next piece.

        Args:
            last: nothing follows; what is held back comes out.
        """
        self._held, self._news, self._text = self._held + text, {}, ""
        while self._end_call() if self._inside else self._begin_call():
            pass
        marker = END if self._inside else BEGIN
        at = self._held.find(marker) if not last else -1
        safe = at if at >= 0 else len(self._held) - (0 if last else _could_begin(marker, self._held))
        self._take(self._held[:safe])
        self._held = self._held[safe:]
        return self._text, [self._news[index] for index in sorted(self._news)]

    def _begin_call(self) -> bool:
        head = HEAD.search(self._held)
        if head is None:
            return False
        self._take(self._held[: head.start()])
        self._held, self._inside = self._held[head.end() :], True
        function = r.FunctionDelta(name=head[1])
        self._news[self.calls] = r.CallDelta(
            index=self.calls, id=f"call_{secrets.token_hex(12)}", type="function", function=function
        )
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
            index = self.calls - 1
            delta = self._news.setdefault(index, r.CallDelta(index=index, function=r.FunctionDelta()))
            delta.function.arguments += piece


def read_calls(text: str) -> tuple[str, list[r.ToolCall]]:
    """Text and calls of a whole answer."""
    content, deltas = CallReader().feed(text, last=True)
    calls = [
        r.ToolCall(
            id=delta.id or "", function=r.Call(name=delta.function.name or "", arguments=delta.function.arguments)
        )
        for delta in deltas
    ]
    return (content.rstrip() if calls else content), calls


def finish_of(reason: FinishReason | None, calls: int) -> r.ChatFinishReason | None:
    """Why an answer ended, in chat's words: one that called and was not cut off waits for its tools."""
    return "tool_calls" if reason == "stop" and calls else reason


def _could_begin(marker: str, text: str) -> int:
    """Length of the longest end of the text that begins the marker."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)

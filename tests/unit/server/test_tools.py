"""Calls are read out of an answer's text at any cuts; the other text stays text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.answers.engine import FinishReason
from dflash_torch.server.chat import CallReader

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\n</tool_call>"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
ANSWERS = {
    "no call < here": ("no call < here", []),
    f"Let me see. {ONE}": ("Let me see.", [("f", '{"a": "}\\n</tool_call>"}')]),
    f"{ONE}\n{TWO}\n": ("", [("f", '{"a": "}\\n</tool_call>"}'), ("g", "{}")]),
    f"{TWO}\n and so on": ("and so on", [("g", "{}")]),
    TWO[: TWO.index("{}") + 1]: ("", [("g", "{")]),
    TWO[:20]: (TWO[:20], []),
    "a <tool_": ("a <tool_", []),
}


@given(answer=st.sampled_from(list(ANSWERS)), cuts=st.lists(st.integers(0, 120), max_size=20))
def test_pieces_add_up_to_the_whole_however_an_answer_is_cut(answer: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    reader, text, names, arguments = CallReader(), "", list[str](), dict[int, str]()
    for n in range(len(edges) - 1):
        said, deltas = reader.feed(answer[edges[n] : edges[n + 1]], last=n == len(edges) - 2)
        text += said
        for delta in deltas:
            names += [delta["function"]["name"]] if "name" in delta["function"] else []
            arguments[delta["index"]] = arguments.get(delta["index"], "") + delta["function"]["arguments"]
    expected, calls = ANSWERS[answer]
    assert re.sub(r"\s+$", "", text) == expected
    assert [(name, arguments[n]) for n, name in enumerate(names)] == calls


def test_spaces_between_words_after_a_call_are_kept() -> None:
    reader = CallReader()
    pieces = [reader.feed(piece, last=False)[0] for piece in (TWO, "\n", "and", " so", " on")]
    assert "".join(pieces) == "and so on"


@pytest.mark.parametrize(
    ("answer", "reason", "told", "unfinished"),
    [
        (TWO, "stop", "tool_calls", None),
        ("no call", "stop", "stop", None),
        (TWO, "length", "length", None),
        (TWO[: TWO.index("{}") + 1], "stop", "stop", TWO[: TWO.index("{}") + 1]),
        (TWO[: TWO.index("{}") + 2], "stop", "stop", TWO[: TWO.index("{}") + 2]),
        (TWO.removesuffix("</tool_call>"), "stop", "tool_calls", None),
        (ONE[: ONE.index("}")], "length", "length", ONE[: ONE.index("}")]),
    ],
)
def test_a_call_that_a_stop_string_cut_off_is_no_call(
    answer: str, reason: FinishReason, told: str, unfinished: str | None
) -> None:
    reader = CallReader()
    reader.feed(answer, last=True)
    assert (reader.finish_of(reason), reader.unfinished) == (told, unfinished)

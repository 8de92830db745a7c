"""A chat template may leave out a message without an error: that is an error here, whoever renders it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.answers.chat_template import render_messages
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_tokenizer
from tests.support.tiny_target import write_tiny_target

QWEN = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<s>{{ m.content }}{% elif m.role == 'user' %}<u>{{ m.content | trim }}"
    "{% elif m.role == 'assistant' %}<a>{{ m.content.split('</think>')[-1] }}"
    "{% for t in m.tool_calls or [] %}<c>{{ t.function.name }} {{ t.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}<t>{{ m.content | tojson }}{% endif %}{%- endfor %}<a>"
)
"""Branches for four roles, and none for `developer`."""
NO_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""Later messages of role `system` are left out."""
USERS_ALONE = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "[1]", "tool_call_id": "c"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("target")
    return load_tokenizer(str(write_tiny_target(folder)))


def rendered(tokenizer: Any, template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    tokenizer.chat_template = template
    return render_messages(tokenizer, messages, variables)


@pytest.mark.parametrize("messages", [[USER], CALLS, [{"role": "system", "content": "s"}, USER], [USER, USER]])
def test_what_a_template_writes_is_left_as_it_is(tokenizer: Any, messages: list[dict[str, Any]]) -> None:
    found = rendered(tokenizer, QWEN, messages)
    assert found == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("text", ["", " \n", "<think>so</think>", "</think>"])
def test_an_answer_without_text_but_its_thoughts_is_no_loss(tokenizer: Any, text: str) -> None:
    assert rendered(tokenizer, QWEN, [USER, {"role": "assistant", "content": text}, USER])


def test_a_developer_speaks_as_the_system_where_the_template_does_not_know_the_role(tokenizer: Any) -> None:
    told = [{"role": "developer", "content": "Latin!"}, USER]
    assert rendered(tokenizer, QWEN, told) == "<s>Latin!<u>hi<a>"
    raising = QWEN.replace("{% endif %}{%- endfor %}", "{% else %}{{ raise_exception('no') }}{% endif %}{%- endfor %}")
    assert rendered(tokenizer, raising, told) == "<s>Latin!<u>hi<a>"
    assert rendered(tokenizer, NO_CALLS, told) == "<developer>Latin!<user>hi"


@pytest.mark.parametrize(
    ("template", "messages", "number", "lost"),
    [
        (QWEN, [USER, {"role": "critic", "content": "bad"}], 1, "the text of this message (role 'critic')"),
        # A text that stands elsewhere, too, is lost all the same.
        (QWEN, [USER, {"role": "critic", "content": "hi"}], 1, "the text of this message (role 'critic')"),
        (NO_CALLS, CALLS, 1, "the calls of this message (role 'assistant')"),
        (FIRST_SYSTEM, [USER, {"role": "system", "content": "s"}], 1, "the text of this message (role 'system')"),
        (USERS_ALONE, [{"role": "developer", "content": "s"}, USER], 0, "the text of this message (role 'system')"),
        ("{{ messages[-1].content }}", [USER, USER], 0, "the text of this message (role 'user')"),
    ],
    ids=["role", "its text elsewhere", "calls", "place", "developer", "history"],
)  # fmt: skip
def test_a_message_that_the_template_leaves_out_is_refused_by_its_number_and_role(
    tokenizer: Any, template: str, messages: list[dict[str, Any]], number: int, lost: str
) -> None:
    with pytest.raises(UserError) as refused:
        rendered(tokenizer, template, messages)
    assert refused.value.where == f"messages.{number}"
    assert lost in refused.value.what


def test_a_template_that_refuses_a_message_says_why(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="System message must be at the beginning"):
        rendered(tokenizer, QWEN, [USER, {"role": "developer", "content": "x"}])

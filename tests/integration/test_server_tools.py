"""Tools through the official client: the target is shown the offered tools, and its calls fit their schemas."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from dflash_torch.server.api import ChatRequest
from dflash_torch.server.chat import render_chat
from tests.house import ROOT
from tests.support.serving import MODEL, Running, running

EXAMPLE = ROOT / "examples" / "tools.jinja"


def tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": schema}}


WEATHER = tool("get_weather", city={"enum": ["Paris", "Bonn"]}, days={"type": "integer", "minimum": 1, "maximum": 9})
CLOCK = tool("get_time", zone={"enum": ["UTC"]})
MESSAGES: Any = [{"role": "user", "content": "the fox?"}]


def chat(client: OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120, "tools": [WEATHER, CLOCK]}
    return client.chat.completions.create(**{**given, **fields})


def fits(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.type == "function"
    assert call.id
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Paris", "Bonn")
        assert 1 <= arguments["days"] <= 9
    else:
        assert (call.function.name, arguments) == ("get_time", {"zone": "UTC"})


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_forced_call_names_a_tool_and_its_arguments_fit(client: OpenAI, choice: Any, temperature: float) -> None:
    answers = chat(client, tool_choice=choice, parallel_tool_calls=False, temperature=temperature, n=2, seed=3)
    for answer in answers.choices:
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        fits(call)
        assert choice == "required" or call.function.name == "get_time"


def test_a_call_is_streamed_piece_by_piece_and_adds_up_to_the_whole(client: OpenAI) -> None:
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = chat(client, **forced).choices[0].message.tool_calls
    chunks = list(chat(client, stream=True, **forced))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert len(deltas) > 2
    first, rest = deltas[0], deltas[1:]
    assert (first.function.name, first.type, bool(first.id)) == (whole.function.name, "function", True)
    assert all((delta.index, delta.id, delta.function.name) == (0, None, None) for delta in rest)
    assert "".join(delta.function.arguments or "" for delta in deltas) == whole.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


def test_the_official_clients_accumulator_reads_a_stream_of_several_calls(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 150}
    with client.chat.completions.stream(**asked, temperature=1.0, seed=5) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert calls
    for call in calls[: -1 if final.choices[0].finish_reason == "length" else None]:
        fits(call)
    assert len({call.id for call in calls}) == len(calls)


def test_an_answer_that_is_free_may_call_nothing_and_is_text(client: OpenAI) -> None:
    answer = chat(client, max_tokens=12).choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content
    assert answer.finish_reason == "length"


def test_tool_choice_none_answers_as_if_there_were_no_tools(client: OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12)
    assert chat(client, tool_choice="none", max_tokens=12).choices == plain.choices


def test_the_examples_template_offers_tools_and_takes_calls_and_results_back(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", EXAMPLE.read_text())
    function = {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'}
    called = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    history = [*MESSAGES, called, {"role": "tool", "tool_call_id": "a", "content": "22 degrees"}]
    body = ChatRequest.model_validate({"model": MODEL, "messages": history, "tools": [WEATHER, CLOCK]})
    text = render_chat(served.engine.tokenizer, body)
    assert text.count("<|im_start|>system") == 1
    assert all(words in text for words in ('"name": "get_weather"', '"arguments": {"', "22 degrees"))
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_calls_and_their_results_go_back_to_the_target(client: OpenAI, served: Running) -> None:
    called = chat(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "22 degrees"}
    history = [*MESSAGES, called.model_dump(), result]
    assert (
        chat(client, messages=history, max_tokens=4).usage.prompt_tokens
        > chat(client, max_tokens=4).usage.prompt_tokens
    )
    body = ChatRequest.model_validate({"model": MODEL, "messages": history, "tools": [WEATHER, CLOCK]})
    text = render_chat(served.engine.tokenizer, body)
    assert text.startswith("<tool_call>get_weather get_time")
    assert '"arguments": {"' in text  # an object for the template, not text in quotes
    assert "22 degrees" in text


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_call_is_the_same_with_and_without_speculation(served: Running, temperature: float) -> None:
    """Grammar and drafts together: token for token what the target alone would have called."""
    body = {"model": MODEL, "messages": MESSAGES, "temperature": temperature, "seed": 7, "max_tokens": 100}
    body |= {"tools": [WEATHER, CLOCK], "tool_choice": "required", "return_token_ids": True}
    with running(served.engine.plain()) as plain:
        ids = [
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["token_ids"]
            for url in (served.url, plain.url)
        ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [CLOCK, CLOCK]}, "two of them have one name"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools to call"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "there is no tool 'fly'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "should match pattern"),
        ({"tools": [tool("f", x={"type": "nonsense"})]}, "cannot be enforced"),
        ({"tools": [tool("f", x={"$ref": "#/properties/x"})], "tool_choice": "required"}, "grammar cannot go on"),
        ({"response_format": {"type": "json_object"}}, "not together with response_format"),
        ({"extra_body": {"min_tokens": 4}}, "not together with min_tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function":
            {"name": "f", "arguments": "[1]"}}]}]}, "no JSON object"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "needs content"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_a_400(client: OpenAI, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, **fields)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "has no place for tools"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "in another form"),
        ("{{ tools }}<tool_call><function=f>{{ messages }}", "in another form"),
    ],
)
def test_a_target_that_was_never_taught_to_call_is_a_400(
    client: OpenAI, served: Running, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", template)
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client)


@pytest.mark.parametrize("stop", ["ame", "Bonn", "days", '"get_'])
def test_a_call_that_a_stop_string_cut_off_is_text(client: OpenAI, stop: str) -> None:
    forced = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "parallel_tool_calls": False}
    forced["stop"] = stop
    choice = chat(client, **forced).choices[0]
    if choice.finish_reason == "tool_calls":  # this call does not hold it
        fits(choice.message.tool_calls[0])
    else:
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content.startswith("<tool_call>")
    assert [*chat(client, stream=True, **forced)][-1].choices[0].finish_reason == choice.finish_reason

"""Every supported field through the official client, over a real socket."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, Running, running

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": MESSAGES, "max_tokens": 12, **fields})


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{**GREEDY, "prompt": "the quick", "max_tokens": 12, **fields})


def streamed(chunks: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return texts


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/chat/completions"])
def test_a_path_that_is_not_served_is_a_404_that_names_those_that_are(served: Running, path: str) -> None:
    answer = httpx.post(f"{served.url}{path}", json={"model": MODEL})
    assert answer.status_code == 404
    told = answer.json()["error"]["message"]
    assert told.startswith(f"{path} is not served; these are: /v1/models, ")
    assert "/v1/chat/completions, /v1/completions" in told


def test_the_model_is_listed_and_another_is_a_404(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="not served here"):
        chat(client, model="gpt-nothing")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-nothing")


def test_a_chat_answer_has_role_text_reason_and_usage(client: OpenAI) -> None:
    response = chat(client)
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert response.usage.completion_tokens == 12
    assert response.usage.total_tokens == response.usage.prompt_tokens + 12
    assert response.system_fingerprint is None


@pytest.mark.parametrize("call", [chat, complete])
def test_a_stream_adds_up_to_the_whole(client: OpenAI, call: Any) -> None:
    whole = call(client).choices[0]
    chunks = list(call(client, stream=True))
    assert streamed(chunks) == {0: whole.text if hasattr(whole, "text") else whole.message.content}
    if call is chat:
        roles = [chunk.choices[0].delta.role for chunk in chunks]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)


@pytest.mark.parametrize("call", [chat, complete])
def test_token_ids_and_usage_come_where_they_are_asked_for(client: OpenAI, call: Any) -> None:
    whole = call(client, extra_body={"ignore_eos": True, "return_token_ids": True})
    token_ids = whole.choices[0].token_ids
    assert len(token_ids) == 12
    asked = {"extra_body": {"ignore_eos": True, "return_token_ids": True}, "stream_options": {"include_usage": True}}
    *chunks, last = call(client, stream=True, **asked)
    assert [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids] == token_ids
    details = {"prompt_tokens_details": last.usage.prompt_tokens_details}
    assert (last.choices, last.usage) == ([], whole.usage.model_copy(update=details))
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in (*chunks, last)}) == 1
    assert call(client).choices[0].token_ids is None


def test_n_answers_have_seeds_of_their_own_and_share_the_prompt(client: OpenAI) -> None:
    fields = {"temperature": 1.0, "seed": 3, "n": 3}
    response = chat(client, **fields)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in response.choices}) == 3
    assert response.usage.completion_tokens == 36
    assert response.usage.prompt_tokens == chat(client).usage.prompt_tokens
    again = chat(client, temperature=1.0, seed=3).choices[0]
    assert again.message.content == response.choices[0].message.content
    assert streamed(chat(client, stream=True, **fields)) == {c.index: c.message.content for c in response.choices}


def test_several_prompts_as_text_or_tokens_are_answered_in_order(client: OpenAI) -> None:
    both = complete(client, prompt=["the quick", "lazy dog"])
    assert [choice.text for choice in both.choices] == [
        complete(client, prompt=prompt).choices[0].text for prompt in ("the quick", "lazy dog")
    ]
    assert (
        complete(client, prompt=[10, 11, 12]).choices[0].text == complete(client, prompt=[[10, 11, 12]]).choices[0].text
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [chat, complete])
def test_a_stop_string_ends_the_answer_before_it_wherever_tokens_cut_it(
    client: OpenAI, call: Any, stream: bool
) -> None:
    whole = streamed(call(client, stream=True, max_tokens=30))[0]
    stop = whole[5:8]
    cut = whole[: whole.index(stop)]
    if stream:
        chunks = list(call(client, stream=True, max_tokens=30, stop=["never there", stop]))
        assert streamed(chunks) == {0: cut}
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        response = call(client, max_tokens=30, stop=stop)
        choice = response.choices[0]
        assert (choice.text if hasattr(choice, "text") else choice.message.content) == cut
        assert choice.finish_reason == "stop"
        assert response.usage.completion_tokens < 30


@pytest.mark.parametrize(("token", "extra"), [("2", {}), ("50", {"stop_token_ids": [50]})], ids=["eos", "stop token"])
def test_a_stop_token_ends_the_answer_and_is_not_text(client: OpenAI, token: str, extra: dict[str, Any]) -> None:
    response = chat(client, logit_bias={token: 100}, extra_body=extra)
    assert (response.choices[0].finish_reason, response.choices[0].message.content) == ("stop", "")
    assert response.usage.completion_tokens == 1


def test_logit_bias_and_penalties_change_what_is_said(client: OpenAI) -> None:
    plain = complete(client).choices[0].text
    biased = complete(client, logit_bias={"60": 100}).choices[0].text
    assert biased == biased[0] * 12
    assert complete(client, frequency_penalty=2, presence_penalty=2).choices[0].text != plain


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1.0}])
def test_top_k_and_min_p_can_make_sampling_greedy(client: OpenAI, extra: dict[str, Any]) -> None:
    sampled = complete(client, temperature=1.5, extra_body={"ignore_eos": True, **extra}).choices[0].text
    assert sampled == complete(client).choices[0].text


def test_an_answer_ends_at_its_limit_or_at_the_models_length(client: OpenAI, served: Running) -> None:
    assert chat(client, max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5
    response = chat(client, max_tokens=None)
    assert response.choices[0].finish_reason == "length"
    assert response.usage.total_tokens == served.engine.scheduler.capacity


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_are_of_every_token_and_the_best_is_the_greedy_one(client: OpenAI, stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 3}
    if stream:
        entries = [e for c in chat(client, stream=True, **fields) for e in (c.choices[0].logprobs.content or [])]
    else:
        entries = chat(client, **fields).choices[0].logprobs.content
    assert len(entries) == 12
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.top_logprobs[0].token == entry.token
        assert sum(map(math.exp, values)) < 1.001
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


def test_completion_logprobs_are_parallel_lists(client: OpenAI) -> None:
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
    assert all(2 <= len(top) <= 3 or len(set(top)) < 3 for top in logprobs.top_logprobs)
    parts = list(complete(client, logprobs=2, stream=True))
    assert [token for part in parts for token in part.choices[0].logprobs.tokens] == logprobs.tokens
    assert [offset for part in parts for offset in part.choices[0].logprobs.text_offset] == logprobs.text_offset


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_response_format_json_schema_is_obeyed(client: OpenAI, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "digit", "schema": SCHEMA, "strict": True}}
    response = chat(client, response_format=form, max_tokens=100, temperature=temperature, n=2)
    for choice in response.choices:
        assert set(json.loads(choice.message.content)) == {"n"}
        assert choice.finish_reason == "stop"


def test_response_format_json_object_and_regex_are_obeyed(client: OpenAI) -> None:
    bias = {str(token): 5 for token in client_tokens('"}')}
    text = chat(client, response_format={"type": "json_object"}, max_tokens=200, logit_bias=bias).choices[0]
    if text.finish_reason == "stop":
        assert isinstance(json.loads(text.message.content), dict)
    assert text.message.content.lstrip().startswith("{")
    form = {"type": "regex", "pattern": "(fox|dog)-[0-9]{4}"}
    chunks = chat(client, extra_body={"response_format": form}, stream=True, max_tokens=50)
    assert re.fullmatch(form["pattern"], streamed(chunks)[0])


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": "(fox|dog)-[0-9]{4}"}, "(fox|dog)-[0-9]{4}"),  # as SGLang's clients send it
        ({"structured_outputs": {"regex": "fox-[0-9]"}}, "fox-[0-9]"),  # as vLLM's clients do
        ({"structured_outputs": {}, "response_format": {"type": "regex", "pattern": "fox-[0-9]"}}, "fox-[0-9]"),
        ({"structured_outputs": {"choice": ["yes", 'no "way"']}}, 'yes|no "way"'),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{\s*"n":\s*[0-9]\s*\}'),
    ],
)
def test_answers_are_constrained_as_other_engines_clients_ask(client: OpenAI, extra: Any, pattern: str) -> None:
    assert re.fullmatch(pattern, complete(client, extra_body=extra, max_tokens=100).choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_min_tokens_puts_off_every_kind_of_stop(client: OpenAI, stream: bool) -> None:
    """End of sequence and a stop token are forced as soon as they may come; the stop string is everywhere."""

    def said(**fields: Any) -> tuple[int, str]:
        answer = complete(client, stream=True, stream_options={"include_usage": True}, **fields) if stream else None
        if answer is None:
            whole = complete(client, **fields)
            return whole.usage.completion_tokens, whole.choices[0].finish_reason
        *events, last = answer
        return last.usage.completion_tokens, events[-1].choices[0].finish_reason

    assert said(logit_bias={"2": 100}, extra_body={"min_tokens": 7}) == (8, "stop")
    assert said(logit_bias={"50": 100}, extra_body={"min_tokens": 7, "stop_token_ids": [50, 99999]}) == (8, "stop")
    always = complete(client, logit_bias={"60": 100}).choices[0].text[0]
    assert said(logit_bias={"60": 100}, stop=always, extra_body={"min_tokens": 7}) == (8, "stop")
    assert said(logit_bias={"2": 100}, max_tokens=5, extra_body={"min_tokens": 5}) == (5, "length")


def test_min_tokens_changes_nothing_else(client: OpenAI, served: Running) -> None:
    longer = {"extra_body": {"min_tokens": 12}}
    assert complete(client, **longer, max_tokens=12).choices[0].text
    with (
        running(served.engine.plain()) as plain,
        OpenAI(base_url=f"{plain.url}/v1", api_key="any", max_retries=0) as other,
    ):
        for seed in range(3):
            given = {**longer, "seed": seed, "temperature": 1.3, "logit_bias": {"2": 5}, "max_tokens": 24}
            assert complete(client, **given).choices[0].text == complete(other, **given).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_every_answer(client: OpenAI, stream: bool) -> None:
    asked: Any = {"prompt": ["the quick", "lazy dog"], "n": 2, "stream": stream, "temperature": 1.0, "seed": 4}
    both = [complete(client, extra_body={"ignore_eos": True, "echo": echo}, **asked) for echo in (True, False)]
    echoed, plain = (streamed(b) if stream else {c.index: c.text for c in b.choices} for b in both)
    assert echoed == {index: ("the quick" if index < 2 else "lazy dog") + text for index, text in plain.items()}
    ids = complete(client, prompt=[10, 11], extra_body={"ignore_eos": True, "echo": True}).choices[0].text
    assert ids.endswith(complete(client, prompt=[10, 11]).choices[0].text)
    assert len(ids) > len(complete(client, prompt=[10, 11]).choices[0].text)
    with pytest.raises(openai.BadRequestError, match="not with logprobs"):
        complete(client, logprobs=1, extra_body={"echo": True})
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        complete(client, prompt=[-5], extra_body={"echo": True})


def test_the_chat_template_is_told_what_a_client_asks_of_it(client: OpenAI) -> None:
    plain = chat(client).usage.prompt_tokens
    assert chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).usage.prompt_tokens > plain
    assert chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).usage.prompt_tokens == plain
    assert chat(client, reasoning_effort="high").usage.prompt_tokens > plain


def client_tokens(text: str) -> list[int]:
    """Byte tokens of the tiny tokenizer: specials first, then printable bytes in order."""
    return [4 + ord(char) - ord("!") for char in text]


@pytest.mark.parametrize("stream", [False, True])
def test_acceptance_comes_on_demand_in_vllms_shape(client: OpenAI, stream: bool) -> None:
    extra = {"ignore_eos": True, "acceptance_metrics": "detailed"}
    if stream:
        *_, last = chat(client, extra_body=extra, stream=True, stream_options={"include_usage": True})
    else:
        last = chat(client, extra_body=extra)
    metrics = last.model_extra["metrics"]["speculative_decoding"]
    assert metrics["num_spec_tokens"] == 3
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"] == len(metrics["per_step_drafted"])
    assert sum(metrics["per_step_accepted"]) == metrics["num_accepted_draft_tokens"]
    details = last.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == metrics["num_accepted_draft_tokens"]
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == metrics["num_draft_tokens"] > 0
    expected = 1 + metrics["num_accepted_draft_tokens"] / metrics["num_spec_steps"]
    assert metrics["mean_acceptance_length"] == pytest.approx(expected)
    assert chat(client).model_extra["metrics"] is None
    two = chat(client, n=2, extra_body=extra)
    assert two.model_extra["metrics"]["speculative_decoding"] is None
    assert two.usage.completion_tokens_details.rejected_prediction_tokens >= details.rejected_prediction_tokens


def test_a_request_may_switch_speculation_off_or_narrow_it(client: OpenAI) -> None:
    found = {}
    for asked in ("auto", "off", 2, 4):
        extra = {"ignore_eos": True, "return_token_ids": True, "acceptance_metrics": "detailed", "speculative": asked}
        answer = chat(client, extra_body=extra)
        details = answer.usage.completion_tokens_details
        drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        metrics = answer.model_extra["metrics"]["speculative_decoding"]
        found[asked] = (answer.choices[0].token_ids, drafted, max(metrics["per_step_drafted"], default=0))
    assert len({tuple(tokens) for tokens, *_ in found.values()}) == 1
    assert found["off"][1:] == (0, 0)
    assert (found[2][2], found[4][2]) == (1, 3)
    assert found["auto"][1] > 0
    for wrong, said in ((5, "5 slots, but a block has 4"), (0, "speculative"), ("no", "speculative")):
        with pytest.raises(openai.BadRequestError, match=said):
            chat(client, extra_body={"speculative": wrong})


def test_a_prefix_that_was_seen_before_is_reused_and_reported(client: OpenAI, served: Running) -> None:
    extra = {"ignore_eos": True, "cache_salt": "a test of its own"}
    first, second = (complete(client, prompt=[9] * 20, extra_body=extra) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 19
    assert first.choices[0].text == second.choices[0].text
    before = reused(served)
    complete(client, prompt=[77] * 30, n=4, temperature=1.0)  # which computes its prompt once
    assert reused(served) - before == 3 * 29


def reused(served: Running) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("dflash:prompt_tokens_cached_total")).split()[-1])


NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
MANY = {f"k{n}": {"type": "integer"} for n in range(1200)}  # all of them optional
TOO_WIDE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": MANY}}}
RECURSIVE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 17}, "n", None),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", None),
        ({"messages": [{"role": "user", "content": "x " * 600}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x " * 600_000}]}, "messages", "context_length_exceeded"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "invalid_value"),
        ({"extra_body": {"stop_token_ids": list(range(129))}}, "stop_token_ids", "invalid_value"),
        ({"stop": ["x" * 257]}, "stop", "invalid_value"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "unknown_parameter"),
        ({"extra_body": {"logits_processors": ["os.system"]}}, "logits_processors", "unknown_parameter"),
        ({"response_format": NO_SCHEMA}, "response_format", None),
        ({"response_format": RECURSIVE}, "response_format", "invalid_value"),
        ({"response_format": TOO_WIDE}, "response_format", "invalid_value"),
        ({"extra_body": {"regex": "(a{1000}){100}"}}, "regex", "invalid_value"),
        ({"extra_body": {"response_format": {"type": "regex", "pattern": "("}}}, "response_format", None),
        ({"extra_body": {"regex": "("}}, "regex", None),
        ({"extra_body": {"regex": "a", "structured_outputs": {"choice": ["a"]}}}, "", "invalid_value"),
        ({"extra_body": {"regex": "a", "min_tokens": 1}}, "min_tokens", "invalid_value"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs.grammar", None),
        ({"extra_body": {"min_tokens": 13}}, "min_tokens", "invalid_value"),
        ({"extra_body": {"chat_template_kwargs": {"no_such_thing": 1}}}, "chat_template_kwargs", "invalid_value"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs", "invalid_value"),
        ({"extra_body": {"chat_template_kwargs": {"if": 1}}}, "chat_template_kwargs", "invalid_value"),
        ({"extra_body": {"chat_template_kwargs": {"call": 1}}}, "chat_template_kwargs", "invalid_value"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs", "invalid_value"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it(
    client: OpenAI, fields: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error"
    assert (body["param"] or "").startswith(param)
    assert code in (None, body["code"])
    assert body["message"]


def test_a_long_conversation_is_refused_before_its_text_is_encoded(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="characters, more than 256 tokens can hold"):
        chat(client, extra_body={"chat_template_kwargs": {"reasoning_effort": "x" * 100_000}})


@pytest.mark.parametrize("field", ["user", "stop", "cache_salt", "regex"])
def test_half_a_surrogate_pair_is_a_400_that_names_its_field(served: Running, field: str) -> None:
    content = json.dumps({"model": "tiny", "prompt": "a", field: "a\ud800"})
    headers = {"Content-Type": "application/json"}
    said = httpx.post(f"{served.url}/v1/completions", content=content, headers=headers).json()["error"]
    assert said["param"] == field
    assert "half a surrogate pair" in said["message"]


def test_null_fields_mean_their_defaults_and_content_may_come_in_text_parts(client: OpenAI) -> None:
    nulls = {"stop": None, "seed": None, "logit_bias": None, "user": None, "tools": None, "response_format": None}
    assert chat(client, extra_body={"ignore_eos": True, **nulls}).choices == chat(client).choices
    content = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox?"}]
    assert chat(client, messages=[MESSAGES[0], {"role": "user", "content": content}]).choices == chat(client).choices


NO_EFFECT: list[dict[str, Any]] = [
    {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "request_id": "r"},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
    {"safety_identifier": "s", "verbosity": "medium", "modalities": ["text"]},
    {"prediction": {"type": "content", "content": "the fox"}},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    {"add_generation_prompt": True, "continue_final_message": False, "use_beam_search": False, "priority": 0},
    {"best_of": 1, "suffix": ""},
    {"no_stop_trim": False, "return_hidden_states": False, "stream_reasoning": True, "include_reasoning": True},
    {"separate_reasoning": True},
    {"separate_reasoning": False},
    {"messages": [{**MESSAGES[0], "cache_control": {"type": "ephemeral"}}, MESSAGES[1]]},
    {"messages": [MESSAGES[0], {"role": "user", "content": [
        {"type": "text", "text": "the fox?", "cache_control": {}, "prompt_cache_breakpoint": {"mode": "explicit"}}]}]},
    {"messages": [{**MESSAGES[0], "name": "boss"}, {**MESSAGES[1], "name": "ann"}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", NO_EFFECT)
def test_a_field_that_changes_no_token_is_taken(client: OpenAI, fields: dict[str, Any]) -> None:
    plain, found = chat(client), chat(client, extra_body={"ignore_eos": True, **fields})
    assert (found.choices, found.usage.prompt_tokens) == (plain.choices, plain.usage.prompt_tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("verbosity", "low"),
        ("skip_special_tokens", False),
        ("add_generation_prompt", False),
        ("include_stop_str_in_output", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("priority", 1),
        ("no_stop_trim", True),
        ("return_hidden_states", True),
        ("stream_reasoning", False),
        ("include_reasoning", False),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
    ],
)
def test_a_value_that_would_change_an_answer_is_a_400_that_names_it(client: OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={field: value})
    assert str(caught.value.body["param"]).startswith(field)  # type: ignore[index]


def test_marks_for_a_cache_in_tools_and_in_an_answer_that_is_sent_back_change_no_token(client: OpenAI) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "parameters": {"type": "object"}}
    answer = {"role": "assistant", "content": "x"}

    def prompt_tokens(tool: dict[str, Any], turn: dict[str, Any]) -> int:
        messages = [*MESSAGES, turn, {"role": "user", "content": "and?"}]
        count: int = chat(client, messages=messages, tools=[tool]).usage.prompt_tokens
        return count

    plain = prompt_tokens({"type": "function", "function": function}, answer)
    marked = {"type": "function", "function": {**function, **mark}, **mark}
    assert prompt_tokens(marked, {**answer, "annotations": [{"type": "url_citation"}], "audio": None}) == plain
    assert prompt_tokens(marked, {**answer, "annotations": []}) == plain


def test_a_message_that_the_chat_template_leaves_out_is_a_400_that_names_it_and_its_role(
    served: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template with a branch for each role that it knows, like Qwen3's: `developer` becomes `system`."""
    branches = "{% if m.role in ['system', 'user'] %}<{{ m.role }}>{{ m.content }}{% endif %}"
    template = "{% for m in messages %}" + branches + "{% endfor %}<assistant>"
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", template)
    system = chat(client)
    developer = chat(client, messages=[{"role": "developer", "content": MESSAGES[0]["content"]}, MESSAGES[1]])
    assert (developer.choices, developer.usage.prompt_tokens) == (system.choices, system.usage.prompt_tokens)
    with pytest.raises(
        openai.BadRequestError, match=r"leaves out the text of this message \(role 'assistant'\)"
    ) as told:
        chat(client, messages=[*MESSAGES, {"role": "assistant", "content": "x"}, MESSAGES[1]])
    assert told.value.body["param"] == "messages.2"  # type: ignore[index]


def test_acceptance_can_be_on_for_all_by_the_servers_setting(tiny_folders: tuple[Path, Path]) -> None:
    with (
        running(tiny_engine(tiny_folders), acceptance_metrics="summary") as other,
        OpenAI(base_url=f"{other.url}/v1", api_key="any", max_retries=0) as client,
    ):
        metrics = chat(client).model_extra["metrics"]["speculative_decoding"]
        assert metrics["num_spec_steps"] > 0
        assert metrics["per_step_accepted"] is None


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("chat/completions", '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
         "messages.0.content.0.type", "invalid_value"),
        ("chat/completions", '{"messages": [], "tool_choice": {"type": "allowed_tools"}}', "tool_choice.type", None),
        ("completions", '{"prompt": ["a", [1]]}', "prompt.1", "invalid_value"),
        ("completions", '{"prompt": 5}', "prompt", "invalid_value"),
        ("completions", '{"prompt": "a", "model": ' + DEEP, None, "invalid_json"),
        ("completions", '{"prompt": "a", "seed": ' + "1" * 5000 + "}", None, "invalid_json"),
        ("completions", '{"prompt": "a"', None, "invalid_json"),
        ("completions", "[]", None, "invalid_json"),
        ("completions", "", None, "invalid_json"),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named_in_the_words_of_the_request(
    served: Running, path: str, body: str, param: str | None, code: str | None
) -> None:
    body = body.replace("{", '{"model": "tiny", ', 1)
    answer = httpx.post(f"{served.url}/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "parsing the body" not in error["message"]
    if path == "completions" or code:
        assert (error["param"], error["code"]) == (param, code)


def test_an_earlier_turn_may_be_sent_back_as_it_came(client: OpenAI) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn: Any = {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call]}
    assert chat(client, messages=[*MESSAGES, turn, {"role": "user", "content": "and?"}]).choices
    call["function"] = {"name": "f", "arguments": '{"a": ' + "[" * 5000 + "]" * 5000 + "}"}
    with pytest.raises(openai.BadRequestError, match="no JSON object"):
        chat(client, messages=[*MESSAGES, turn, {"role": "user", "content": "and?"}])

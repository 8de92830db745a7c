"""The client of servers that name tokens differently, refuse requests, answer wrongly or do not answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.answers.engine import Conversation
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import API_KEY_ENV, RefusedError, page_status, read_api_key
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.subjects import ServerSubject
from tests.support.site import site

Reply = tuple[int, Any]
DONE = "data: [DONE]\n\n"
GREEDY = SamplingParams(temperature=0, max_tokens=4)
HELLO = [{"role": "user", "content": "hi"}]
LOGPROBS = {"tokens": ["a", " b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{"a": -0.5}, None]}


@contextmanager
def server(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the requests that it was sent."""
    asked: list[dict[str, Any]] = []

    def reply(_path: str, body: Any, key: str | None) -> Reply:
        if body is None:
            return 200, {"data": [{"id": "the-model"}]}
        asked.append({**body, "key": key})
        return answer(body)

    with site(reply) as url:
        yield url, asked


def completion(**choice: Any) -> Reply:
    return 200, {"choices": [{"text": "a b", "finish_reason": "length", **choice}], "usage": {"prompt_tokens": 3}}


def test_token_ids_are_taken_where_a_server_gives_them() -> None:
    with server(lambda _: completion(token_ids=[5, 6])) as (url, asked):
        answer = Endpoint(url + "/v1/").complete("hello", GREEDY)
    assert (answer.pieces, answer.text, answer.completion_tokens) == ((5, 6), "a b", None)
    assert (asked[0]["return_token_ids"], asked[0]["model"]) == (True, "the-model")


@pytest.mark.parametrize(
    "chat",
    [
        {"choices": [{"message": {"content": "a"}, "response_token_ids": [5], "prompt_token_ids": [1, 2]}]},  # SGLang
        {"choices": [{"message": {"content": "a"}, "token_ids": [5]}], "prompt_token_ids": [1, 2]},  # vLLM
    ],
)
def test_every_engines_names_of_token_ids_in_chats_are_known(chat: dict[str, Any]) -> None:
    with server(lambda _: (200, chat)) as (url, _):
        answer = Endpoint(url).complete(HELLO, GREEDY)
    assert (answer.token_ids, answer.prompt_ids) == ((5,), (1, 2))


@pytest.mark.parametrize(
    ("overlaps", "owner", "wrong"),
    [
        (True, "sglang", "--disable-overlap-schedule"),
        (False, "sglang", None),
        (None, "sglang", "/server_info"),  # an ingress may serve the paths of /v1 alone
        (None, "vllm", None),
    ],
)
def test_sglangs_late_penalties_are_known_by_its_settings(overlaps: bool | None, owner: str, wrong: str | None) -> None:
    pages: dict[str, Any] = {"/v1/models": {"data": [{"id": "m", "owned_by": owner}]}}
    if overlaps is not None:
        pages["/server_info"] = {"disable_overlap_schedule": not overlaps}
    with site(lambda path, *_: (200, pages[path]) if path in pages else (404, {})) as url:
        told = ServerSubject(Endpoint(url)).wrong_penalties()
    assert (told is None) == (wrong is None)
    assert (wrong or "") in (told or "")


@pytest.mark.parametrize(("named", "wrong"), [(True, "--disable-overlap-schedule"), (False, "/server_info")])
def test_sglangs_late_penalties_are_known_behind_a_router_by_the_settings_of_a_worker(named: bool, wrong: str) -> None:
    page = '# TYPE sglang_num_queue_reqs gauge\nsglang_num_queue_reqs{worker_addr="http://w"} 0\n'
    ahead: dict[str, Any] = {"/v1/models": {"data": [{"id": "m", "owned_by": "local"}]}, "/engine_metrics": page}
    behind = {"/metrics": "sglang:num_queue_reqs 0.0\n", "/server_info": {"disable_overlap_schedule": False}}
    with (
        site(lambda path, *_: (200, ahead[path]) if path in ahead else (404, "")) as router,
        site(lambda path, *_: (200, behind[path])) as worker,
    ):
        told = ServerSubject(Endpoint(router, metrics_urls=(worker,) if named else ())).wrong_penalties()
    assert wrong in (told or "")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "", "reasoning_content": "so"},  # SGLang
        {"content": None, "reasoning": "so"},  # vLLM
        {"content": None, "reasoning": "so", "reasoning_content": "so"},
    ],
)
def test_the_text_of_a_reasoning_parser_is_read(message: dict[str, Any]) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        if not body.get("stream"):
            return 200, {"choices": [{"message": message, "token_ids": [5, 6]}]}
        deltas = [{"role": "assistant", "content": ""}, message, {"content": "42"}]
        events = [{"choices": [{"delta": delta, "token_ids": [5]}], "error": None} for delta in deltas]
        return 200, ": keep-alive\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + DONE

    with server(answer) as (url, _):
        whole, streamed = (Endpoint(url).complete(HELLO, GREEDY, more) for more in (None, {"stream": True}))
    assert [(one.reasoning, one.text) for one in (whole, streamed)] == [("so", ""), ("so", "42")]


def test_an_error_within_a_stream_is_a_refusal_with_its_message() -> None:
    events = [{"choices": [{"text": "a"}]}, {"error": {"message": "out of\nmemory", "code": 503}}]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    with (
        server(lambda _: (200, stream)) as (url, _),
        pytest.raises(RefusedError, match="HTTP 503: out of memory") as no,
    ):
        Endpoint(url).complete("hello", GREEDY, {"stream": True})
    assert no.value.status == 503


def streamed(*parts: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps({'choices': [part]})}\n\n" for part in parts)


CUT = {
    "in the middle": streamed({"text": "a", "finish_reason": None}),
    "of one of two choices": streamed({"index": 0, "text": "a", "finish_reason": "stop"}, {"index": 1, "text": "b"}),
    "before its first event": "",
}
WHOLE = {
    "by its last event": streamed({"text": "a b"}) + DONE,
    "by its reasons": streamed({"index": 0, "text": "a"}, {"index": 0, "text": " b", "finish_reason": "length"}),
}


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("whole", WHOLE)
def test_a_stream_that_was_cut_is_asked_for_again(cut: str, whole: str) -> None:
    replies = iter([CUT[cut], CUT[cut], WHOLE[whole]])
    with server(lambda body: (200, next(replies)) if body.get("stream") else completion(token_ids=[5])) as (url, asked):
        endpoint = Endpoint(url)
        endpoint.complete("hello", GREEDY)
        assert endpoint.complete("hello", GREEDY, {"stream": True}).text == "a b"
    assert len(asked) == 4


@pytest.mark.parametrize("cut", CUT)
def test_a_stream_that_is_always_cut_is_an_error_and_no_short_answer(cut: str) -> None:
    with (
        server(lambda _: (200, CUT[cut])) as (url, _),
        pytest.raises(RefusedError, match="its stream ends before the answer does") as no,
    ):
        Endpoint(url).complete("hello", GREEDY, {"stream": True})
    assert no.value.status == 502


@pytest.mark.parametrize("told", [": out of memory\n", "data: out of memory\n", 'data: {"message": "out of memory"}\n'])
def test_an_event_of_the_type_error_is_an_error_even_in_a_stream_that_ends_well(told: str) -> None:
    stream = f"{streamed({'text': 'a'})}event: error\n{told}\n{DONE}"
    with server(lambda _: (200, stream)) as (url, _), pytest.raises(RefusedError, match="out of memory"):
        Endpoint(url).complete("hello", GREEDY, {"stream": True})


def test_a_streamed_answer_and_several_choices_are_read_whole() -> None:
    def answer(body: dict[str, Any]) -> Reply:
        if not body.get("stream"):
            return 200, {"choices": [{"text": "a", "token_ids": [5]}, {"text": "b", "token_ids": [6, 7]}]}
        parts = [{"text": "a", "token_ids": [5]}, {"text": " b", "token_ids": [6, 7], "finish_reason": "stop"}]
        events = [*({"choices": [part]} for part in parts), {"choices": [], "usage": {"completion_tokens": 3}}]
        return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    with server(answer) as (url, asked):
        two, streamed = (Endpoint(url).complete("x", GREEDY, more) for more in ({"n": 2}, {"stream": True}))
    assert (asked[0]["n"], two.pieces, [one.text for one in two.choices]) == (2, (5, 6, 7), ["a", "b"])
    assert (streamed.text, streamed.pieces, streamed.completion_tokens) == ("a b", (5, 6, 7), 3)
    assert streamed.finish_reason == "stop"


def test_streamed_choices_are_told_apart_by_their_index() -> None:
    parts = [
        {"index": 1, "text": "b", "token_ids": [6]},
        {"index": 0, "text": "a", "token_ids": [5]},
        {"index": 1, "text": "c", "token_ids": [7], "finish_reason": "length"},
        {"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"},
    ]
    events = "".join(f"data: {json.dumps({'choices': [part]})}\n\n" for part in parts)
    with server(lambda _: (200, events)) as (url, _):
        found = Endpoint(url).complete("x", GREEDY, {"n": 2, "stream": True})
    assert [(one.text, one.pieces, one.finish_reason) for one in found.choices] == [
        ("a", (5,), "stop"),
        ("bc", (6, 7), "length"),
    ]


def test_a_server_that_refuses_unknown_fields_is_asked_in_its_own_way() -> None:
    def tensorrt_llm(body: dict[str, Any]) -> Reply:
        if "return_token_ids" in body:
            return 400, {"object": "error", "message": "extra fields not permitted"}
        return completion(token_ids=[5, 6], text="") if body.get("detokenize") is False else completion()

    with server(tensorrt_llm) as (url, asked):
        target = Endpoint(url)
        assert [target.complete([1, 2], GREEDY).pieces for _ in range(2)] == [(5, 6)] * 2
    assert len(asked) == 3  # found out once, then remembered


def test_without_ids_the_tokens_of_the_logprobs_count_and_without_those_the_text() -> None:
    with server(lambda body: completion(logprobs=LOGPROBS if "logprobs" in body else None)) as (url, _):
        answer = Endpoint(url).complete("hello", GREEDY, top_logprobs=2)
    assert answer.pieces == ("a", " b")
    assert answer.logprobs is not None
    assert (answer.logprobs[0].top, answer.logprobs[1].top) == ((("a", -0.5),), ())
    with server(lambda _: completion()) as (url, _):
        assert Endpoint(url).complete("hello", GREEDY).pieces == ("a", " ", "b")


@pytest.mark.parametrize(
    ("unit", "pieces"), [("token ids", (5, 6)), ("tokens", ("a", " b")), ("characters", tuple("a b"))]
)
def test_answers_come_in_a_unit_that_another_server_has_too(unit: str, pieces: tuple[Any, ...]) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        given: dict[str, Any] = {"prompt_token_ids": [1], "logprobs": LOGPROBS if "logprobs" in body else None}
        return completion(token_ids=[5, 6], **given)  # ids even where nobody asks for them

    with server(answer) as (url, asked):
        replies = [Endpoint(url, unit=unit).complete("hello", GREEDY, top_logprobs=top) for top in (None, 2)]
    assert [reply.pieces for reply in replies] == [pieces] * 2
    assert {reply.prompt_ids for reply in replies} == {(1,) if unit == "token ids" else None}
    assert ("return_token_ids" in asked[0]) == (unit == "token ids")


@pytest.mark.parametrize(
    ("chat_ids", "prompts", "unit"),
    [
        (True, True, "token ids"),
        (False, True, "tokens"),  # behind SGLang's router
        (True, False, "tokens"),  # further questions are made of token ids
    ],
)
def test_the_finest_unit_is_one_in_which_every_question_can_be_asked(chat_ids: bool, prompts: bool, unit: str) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        if isinstance(body.get("prompt"), list) and not prompts:
            return 422, "prompt: data did not match any variant of untagged enum StringOrArray"
        ids = {"token_ids": [5, 6]} if body.get("return_token_ids") and (chat_ids or "prompt" in body) else {}
        if "prompt" in body:
            return completion(logprobs=LOGPROBS if "logprobs" in body else None, **ids)
        content = [{"token": "a", "logprob": -0.5}] if body.get("logprobs") else None
        return 200, {"choices": [{"message": {"content": "a"}, "logprobs": {"content": content}, **ids}]}

    with server(answer) as (url, _):
        assert Endpoint(url).finest_unit([HELLO]) == unit


def test_messages_go_to_chat_and_half_characters_stay_apart() -> None:
    content = [{"token": "\ufffd", "bytes": [0xE2], "logprob": -1, "top_logprobs": []}]
    chat = {"choices": [{"message": {"content": "é"}, "logprobs": {"content": content}}]}
    with server(lambda _: (200, chat)) as (url, asked):
        answer = Endpoint(url).complete(HELLO, GREEDY, top_logprobs=0)
    assert answer.pieces == ("â",)
    assert asked[-1]["messages"] == HELLO


def test_what_is_set_is_sent_and_defaults_that_servers_disagree_on_are_not() -> None:
    params = SamplingParams(top_p=0.9, seed=3, frequency_penalty=0.5, logit_bias={7: 1.5}, stop=("x",), max_tokens=4)
    with server(lambda _: completion(token_ids=[5])) as (url, asked):
        Endpoint(url, "mine").complete("hello", params)
    sent = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "stop": ["x"], "logit_bias": {"7": 1.5}, "model": "mine"}
    assert asked[0] | sent == asked[0]
    assert not {"top_k", "min_p", "logprobs"} & set(asked[0])


def test_penalties_are_those_of_the_request_and_not_of_the_models_own_generation_config() -> None:
    with server(lambda _: completion(token_ids=[5])) as (url, asked):
        Endpoint(url).complete("hello", GREEDY)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert asked[0] | neutral == asked[0]


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    replies = iter([(429, {}), (503, {}), completion(token_ids=[1])])
    with server(lambda _: next(replies)) as (url, asked):
        assert Endpoint(url).complete("hello", GREEDY).pieces == (1,)
    assert len(asked) == 3


def test_answers_come_in_the_order_of_what_was_asked() -> None:
    with server(lambda body: completion(token_ids=[body["prompt"][0]])) as (url, _):
        asked = [([n], GREEDY) for n in range(40)]
        assert [answer.pieces[0] for answer in Endpoint(url).complete_all(asked)] == list(range(40))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((200, b"<html>"), "OpenAI-compatible"),
        ((200, {"choices": []}), "OpenAI-compatible"),
        ((200, {"hello": 1}), "OpenAI-compatible"),
        ((200, [1]), "OpenAI-compatible"),
        ((200, b"[" * 100_000), "OpenAI-compatible"),
        ((500, b"[" * 100_000), "HTTP 500"),
        ((200, {"choices": [{"text": "a"}], "usage": "x"}), "OpenAI-compatible"),
        ((200, {"choices": [{"text": "a"}], "usage": {"completion_tokens": "x"}}), "OpenAI-compatible"),
        ((200, {"choices": [{"text": 5}]}), "OpenAI-compatible"),
        ((200, {"choices": [{"message": "a"}]}), "OpenAI-compatible"),
        ((200, {"choices": [{"text": "a", "logprobs": [1]}]}), "OpenAI-compatible"),
        ((200, b'{"choices": [{"text": "a", "token_ids": [Infinity]}]}'), "OpenAI-compatible"),
        ((404, b"<!DOCTYPE HTML>\n<html>"), "HTTP 404: Not Found; give the address of an OpenAI-compatible server"),
        ((400, {"error": {"message": "temperature:\n no"}}), "400: temperature: no"),
    ],
)
def test_a_refusal_and_what_is_no_completion_are_one_clear_line(reply: Reply, said: str) -> None:
    with server(lambda _: reply) as (url, _), pytest.raises(UserError, match=said) as caught:
        Endpoint(url).complete("hello", GREEDY)
    assert not isinstance(caught.value, RefusedError) or caught.value.status == reply[0]


def test_a_stream_without_an_event_is_no_empty_answer() -> None:
    with server(lambda _: (200, b"<html>")) as (url, _), pytest.raises(UserError, match="no completion"):
        Endpoint(url).complete("hello", GREEDY, {"stream": True})


@pytest.mark.parametrize("models", [{"data": {"id": "m"}}, {"data": "m"}, {"data": [5]}, [], None])
def test_an_odd_list_of_models_says_nothing_of_the_context(models: Any) -> None:
    with site(lambda *_: (200, models)) as url:
        assert Endpoint(url).context is None


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://user:secret@host"])
def test_an_address_is_one_of_a_server_and_carries_no_password(url: str) -> None:
    with pytest.raises(UserError) as refused:
        Endpoint(url)
    assert "secret" not in str(refused.value)


def test_the_key_is_sent_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("# mine\nsesame\n")
    with server(lambda _: completion(token_ids=[1])) as (url, asked):
        target = Endpoint(url, api_key=read_api_key(file))
        target.complete("hello", GREEDY)
    assert asked[0]["key"] == "Bearer sesame"
    assert "sesame" not in repr(target)
    monkeypatch.setenv(API_KEY_ENV, "from the environment")
    assert read_api_key(None) == "from the environment"
    file.write_text("\n")
    for path, said in ((file, "has no key"), (tmp_path / "nothing", "cannot be read")):
        with pytest.raises(UserError, match=said):
            read_api_key(path)


@pytest.mark.parametrize("key", ["ses\name", "ses\x00ame", "sesäme"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(UserError, match="a key has a character that is no visible ASCII") as refused:
        Endpoint("http://127.0.0.1:9", "m", key)
    assert "ame" not in str(refused.value)


def test_the_end_of_a_line_is_no_part_of_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(API_KEY_ENV, "sesame\n")  # as a mounted secret has it
    assert read_api_key(None) == "sesame"
    (tmp_path / "keys").write_text("sesame\nsésame\n")
    with pytest.raises(UserError, match="no visible ASCII"):
        read_api_key(tmp_path / "keys")


def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with server(lambda _: completion(token_ids=[5])) as (url, _):
        assert Endpoint(url).complete("hello", GREEDY).pieces == (5,)
        assert page_status(f"{url}/ready") == 200


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    """Every connection is silently closed after its first answer."""
    body = json.dumps({"choices": [{"text": "a", "token_ids": [7]}]}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()  # it promises to keep it open

    def answer(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(head + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        target = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        assert [target.complete("hello", GREEDY).pieces for _ in range(3)] == [(7,)] * 3


def test_variables_of_the_chat_template_go_with_the_conversation() -> None:
    with server(lambda _: completion(token_ids=[5])) as (url, asked):
        Endpoint(url).complete(Conversation(HELLO, {"enable_thinking": False}), GREEDY)
        Endpoint(url).complete(HELLO, GREEDY)
    assert [body.get("chat_template_kwargs") for body in asked] == [{"enable_thinking": False}, None]

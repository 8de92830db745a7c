"""The client of servers that name tokens differently, refuse requests, answer wrongly or do not answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import API_KEY_ENV, RefusedError, read_api_key
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

Reply = tuple[int, Any]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


class Recorder:
    """What the server was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


@contextmanager
def server(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, Recorder]]:
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply((200, {"data": [{"id": "the-model"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorder.bodies.append(body)
            recorder.keys.append(self.headers["Authorization"])
            self._reply(answer(body))

        def _reply(self, reply: Reply) -> None:
            data = reply[1] if isinstance(reply[1], bytes) else json.dumps(reply[1]).encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", recorder
    finally:
        running.shutdown()
        running.server_close()


def completion(**choice: Any) -> Reply:
    return 200, {"choices": [{"text": "a b", "finish_reason": "length", **choice}], "usage": {"prompt_tokens": 3}}


LOGPROBS = {"tokens": ["a", " b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{"a": -0.5}, None]}


def test_token_ids_are_taken_where_a_server_gives_them() -> None:
    with server(lambda body: completion(token_ids=[5, 6])) as (url, asked):
        answer = Endpoint(url + "/v1/").complete("hello", GREEDY)
    assert (answer.pieces, answer.text, answer.completion_tokens) == ((5, 6), "a b", None)
    assert asked.bodies[0]["return_token_ids"] is True
    assert asked.bodies[0]["model"] == "the-model"


def test_a_server_that_refuses_unknown_fields_is_asked_in_its_own_way() -> None:
    def tensorrt_llm(body: dict[str, Any]) -> Reply:
        if "return_token_ids" in body:
            return 400, {"object": "error", "message": "extra fields not permitted"}
        return completion(token_ids=[5, 6], text="") if body.get("detokenize") is False else completion()

    with server(tensorrt_llm) as (url, asked):
        target = Endpoint(url)
        assert [target.complete([1, 2], GREEDY).pieces for _ in range(2)] == [(5, 6)] * 2
    assert len(asked.bodies) == 3  # found out once, then remembered


def test_without_ids_the_tokens_of_the_logprobs_count_and_without_those_the_text() -> None:
    with server(lambda body: completion(logprobs=LOGPROBS if "logprobs" in body else None)) as (url, _):
        answer = Endpoint(url).complete("hello", GREEDY, top_logprobs=2)
    assert answer.pieces == ("a", " b")
    assert answer.logprobs is not None
    assert (answer.logprobs[0].top, answer.logprobs[1].top) == ((("a", -0.5),), ())
    with server(lambda body: completion()) as (url, _):
        assert Endpoint(url).complete("hello", GREEDY).pieces == ("a", " ", "b")


def test_messages_go_to_chat_and_half_characters_stay_apart() -> None:
    content = [{"token": "\ufffd", "bytes": [0xE2], "logprob": -1, "top_logprobs": []}]
    with server(lambda body: (200, {"choices": [{"message": {"content": "é"}, "logprobs": {"content": content}}]})) as (
        url,
        asked,
    ):
        answer = Endpoint(url).complete([{"role": "user", "content": "hi"}], GREEDY, top_logprobs=0)
    assert answer.pieces == ("â",)
    assert asked.bodies[-1]["messages"] == [{"role": "user", "content": "hi"}]


def test_what_is_set_is_sent_and_defaults_that_servers_disagree_on_are_not() -> None:
    params = SamplingParams(top_p=0.9, seed=3, frequency_penalty=0.5, logit_bias={7: 1.5}, stop=("x",), max_tokens=4)
    with server(lambda body: completion(token_ids=[5])) as (url, asked):
        Endpoint(url, "mine").complete("hello", params)
    body = asked.bodies[0]
    assert body["logit_bias"] == {"7": 1.5}
    assert (body["temperature"], body["top_p"], body["seed"], body["stop"]) == (1.0, 0.9, 3, ["x"])
    assert not {"top_k", "min_p", "repetition_penalty", "logprobs"} & set(body)


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    replies = iter([(429, {}), (503, {}), completion(token_ids=[1])])
    with server(lambda body: next(replies)) as (url, asked):
        assert Endpoint(url).complete("hello", GREEDY).pieces == (1,)
    assert len(asked.bodies) == 3


def test_a_refusal_says_what_the_server_said() -> None:
    refuse = {"error": {"message": "temperature:\n no"}}
    with (
        server(lambda _: (400, refuse)) as (url, _),
        pytest.raises(RefusedError, match="400: temperature: no") as refused,
    ):
        Endpoint(url).complete("hello", GREEDY)
    assert refused.value.status == 400


def test_answers_come_in_the_order_of_what_was_asked() -> None:
    with server(lambda body: completion(token_ids=[body["prompt"][0]])) as (url, _):
        asked = [([n], GREEDY) for n in range(40)]
        assert [answer.pieces[0] for answer in Endpoint(url).complete_all(asked)] == list(range(40))


@pytest.mark.parametrize("body", [b"<html>", {"choices": []}, {"hello": 1}, [1]])
def test_what_is_no_completion_is_one_clear_line(body: Any) -> None:
    with server(lambda _: (200, body)) as (url, _), pytest.raises(UserError, match="OpenAI-compatible"):
        Endpoint(url).complete("hello", GREEDY)


def test_no_server_is_one_clear_line() -> None:
    with pytest.raises(UserError, match=r"no answer .*check the address"):
        Endpoint("http://127.0.0.1:9").complete("hello", GREEDY)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://user:secret@host"])
def test_an_address_is_one_of_a_server_and_carries_no_password(url: str) -> None:
    with pytest.raises(UserError) as refused:
        Endpoint(url)
    assert "secret" not in str(refused.value)


def test_the_key_is_sent_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    with server(lambda body: completion(token_ids=[1])) as (url, asked):
        target = Endpoint(url, api_key=read_api_key(file))
        target.complete("hello", GREEDY)
    assert asked.keys == ["Bearer sesame"]
    assert "sesame" not in repr(target)
    monkeypatch.setenv(API_KEY_ENV, "from the environment")
    assert read_api_key(None) == "from the environment"
    with pytest.raises(UserError, match="cannot be read"):
        read_api_key(tmp_path / "nothing")


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    """Every connection is silently closed after its first answer."""
    with closing_server() as url:
        target = Endpoint(url, "m")
        assert [target.complete("hello", GREEDY).pieces for _ in range(3)] == [(7,)] * 3


@contextmanager
def closing_server() -> Iterator[str]:
    body = json.dumps({"choices": [{"text": "a", "token_ids": [7]}]}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()  # it promises to keep it open
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(head + body)

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"

"""Queue, disconnects, failures, keys and limits: a server's promises when things go wrong."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
import torch
from fastapi.routing import APIRoute

from dflash_torch.answer import PendingAnswer
from dflash_torch.server.app import create_app
from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, Running, running, until

LONG: dict[str, Any] = {"model": MODEL, "prompt": [9, 8, 7], "max_tokens": 240, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 4}
Folders = tuple[Path, Path]


def post(url: str, body: Any = SHORT, **kwargs: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, **kwargs)


def error(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


class Gate:
    """Holds every step of an engine until it is opened, and can break one."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.open, self.faults, self.steps = engine.scheduler.step, True, 0, 0
        self.closes_after = 0
        monkeypatch.setattr(engine.scheduler, "step", self)

    def __call__(self) -> Any:
        while not self.open:
            time.sleep(0.002)
        self.steps += 1
        if self.steps == self.closes_after:
            self.open = False
        if self.faults:
            self.faults -= 1
            raise RuntimeError("injected fault")
        return self.step()


@pytest.fixture
def gate(served: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(served.engine, monkeypatch)
    yield gate
    gate.open = True
    until(served.idle)


def running_requests(server: Running) -> list[PendingAnswer]:
    assert server.worker.loop is not None
    return list(server.worker.loop.running.values())


def waiting_requests(server: Running) -> list[PendingAnswer]:
    assert server.worker.loop is not None
    return list(server.worker.loop.waiting)


def raw_request(url: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and leaves the connection open."""
    place, content = urlparse(url), json.dumps(body).encode()
    connection = socket.create_connection((place.hostname, place.port or 80))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


# --- backpressure


def test_a_full_queue_is_429_at_the_door_and_those_inside_are_answered(narrow: Running, narrow_gate: Gate) -> None:
    server = narrow
    narrow_gate.open = False
    with ThreadPoolExecutor(8) as pool:
        inside = [pool.submit(post, server.url) for _ in range(3)]  # one slot, a queue of two
        until(lambda: server.worker.admitted == 3)
        refused = post(server.url)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert error(refused)["code"] == "queue_full"
        assert post(server.url, SHORT | {"stream": True}).status_code == 429
        narrow_gate.open = True
        assert [future.result().status_code for future in inside] == [200] * 3
    until(server.idle)


@pytest.fixture(scope="module")
def narrow(tiny_folders: Folders) -> Iterator[Running]:
    with running(tiny_engine(tiny_folders, max_batch_size=1), queue=2, ping_seconds=0.05) as server:
        yield server


@pytest.fixture
def narrow_gate(narrow: Running, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(narrow.engine, monkeypatch)


def test_more_answers_than_slots_and_queue_hold_are_a_400(narrow: Running) -> None:
    response = post(narrow.url, SHORT | {"n": 4})
    assert response.status_code == 400
    assert error(response)["param"] == "n"
    assert post(narrow.url, SHORT | {"n": 3}).status_code == 200


def test_while_loading_it_lives_but_is_not_ready(tiny_folders: Folders) -> None:
    engine = tiny_engine(tiny_folders)
    loaded: list[bool] = []

    def slow() -> Any:
        until(lambda: bool(loaded))
        return engine

    with running(engine, start=slow) as server:
        assert httpx.get(f"{server.url}/live").status_code == 200
        assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready")] == [503, 503]
        refused = post(server.url)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert error(refused)["code"] == "not_ready"
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        loaded.append(True)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert post(server.url).status_code == 200


# --- disconnects


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 6}], ids=["whole", "stream", "several"])
def test_a_client_that_leaves_while_running_frees_its_slots_within_a_step(
    served: Running, gate: Gate, more: dict[str, Any]
) -> None:
    gate.closes_after = 3
    connection = raw_request(served.url, LONG | more)
    until(lambda: not gate.open)
    assert (served.worker.running, served.worker.waiting) == ((4, 2) if "n" in more else (1, 0))
    connection.close()
    until(lambda: served.idle() or any(request.cancelled for request in running_requests(served)))
    gate.open = True
    until(served.idle)
    assert gate.steps <= 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_queued_is_never_run(narrow: Running, narrow_gate: Gate, stream: bool) -> None:
    server = narrow
    narrow_gate.open = False
    first = raw_request(server.url, LONG)
    until(lambda: server.worker.running == 1)
    second = raw_request(server.url, LONG | {"stream": stream})
    until(lambda: server.worker.waiting == 1)
    joined = server.engine.scheduler.joined
    second.close()
    until(lambda: all(queued.cancelled for queued in waiting_requests(server)))
    first.close()
    narrow_gate.open = True
    until(server.idle)
    assert server.engine.scheduler.joined == joined


def test_a_client_that_leaves_before_its_body_is_whole_does_no_harm(served: Running) -> None:
    place = urlparse(served.url)
    with socket.create_connection((place.hostname, place.port or 80)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert post(served.url).status_code == 200
    assert served.idle()


def test_a_client_that_leaves_while_its_prompt_is_read_is_no_error(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, left, tokenize = threading.Event(), threading.Event(), served.engine.tokenize

    def slow(prompt: Any) -> list[int]:
        begun.set()
        left.wait(20)
        return tokenize(prompt)

    monkeypatch.setattr(served.engine, "tokenize", slow)
    connection = raw_request(served.url, LONG)
    assert begun.wait(20)
    connection.close()
    assert httpx.get(f"{served.url}/health").status_code == 200  # by then the event loop has seen that it is gone
    left.set()
    assert post(served.url).status_code == 200
    assert served.idle()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


# --- slow streams


def test_a_reader_that_stops_for_a_while_gets_all_of_its_stream_and_delays_no_other(served: Running) -> None:
    slow = raw_request(served.url, LONG | {"stream": True})
    until(lambda: served.worker.running == 1)
    assert post(served.url).status_code == 200
    until(served.idle)  # its answer is done, and not read yet
    slow.settimeout(20)
    received = b""
    while b"data: [DONE]" not in received:
        received += slow.recv(512)
    slow.close()
    events = [json.loads(found) for found in re.findall(rb"^data: ({.*})", received, re.MULTILINE)]
    assert (
        "".join(event["choices"][0]["text"] for event in events) == post(served.url, LONG).json()["choices"][0]["text"]
    )


def test_a_stream_without_news_is_kept_alive_by_comments(narrow: Running, narrow_gate: Gate) -> None:
    narrow_gate.closes_after = 4
    with httpx.stream("POST", f"{narrow.url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": ping") == 3:
                narrow_gate.open = True
    assert lines.count(": ping") >= 3
    assert {line.partition(" ")[0] for line in lines} == {"", ":", "data:"}
    # A comment may still come behind the end of the data: clients skip comments.
    assert [line for line in lines if line.startswith("data:")][-1] == "data: [DONE]"
    until(narrow.idle)


# --- failures


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_fails_its_requests_with_a_500_and_the_server_goes_on(
    served: Running, gate: Gate, stream: bool
) -> None:
    gate.faults = 1
    response = post(served.url, SHORT | {"stream": stream})
    assert response.status_code == 500
    assert "the server goes on" in error(response)["message"]
    assert post(served.url).status_code == 200
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_step_that_fails_mid_stream_ends_the_stream_with_an_error_event(served: Running, gate: Gate) -> None:
    with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        gate.faults = 1
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_finite_fail_their_request_alone(tiny_folders: Folders, stream: bool) -> None:
    engine = tiny_engine(tiny_folders)
    broken = SHORT | {"prompt": [9, 200, 7], "stream": stream}
    with running(engine) as server, torch.no_grad(), ThreadPoolExecutor(1) as pool:
        engine.scheduler.target.embedding[200] = float("nan")
        other = pool.submit(post, server.url, LONG)
        response = post(server.url, broken)
        assert response.status_code == 500
        assert error(response)["message"] == "the target's logits are NaN or infinite"
        assert other.result().json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        until(server.idle)
        ended = f'finished_reason="error",model_name="{MODEL}"}} 1.0'
        assert ended in httpx.get(f"{server.url}/metrics").text


def test_those_that_waited_are_not_failed_by_anothers_step(narrow: Running, narrow_gate: Gate) -> None:
    narrow_gate.open = False
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, narrow.url)
        until(lambda: narrow.worker.running == 1)
        second = pool.submit(post, narrow.url)
        until(lambda: narrow.worker.waiting == 1)
        narrow_gate.faults, narrow_gate.open = 1, True
        assert first.result().status_code == 500
        assert second.result().status_code == 200


def test_an_engine_that_fails_every_step_ends_the_server(
    tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a supervisor starts a new one."""
    engine = tiny_engine(tiny_folders)
    with running(engine) as server:
        Gate(engine, monkeypatch).faults = 1000
        assert [post(server.url).status_code for _ in range(8)] == [500] * 8
        until(lambda: server.server.exit_code == 1)


def test_an_engine_that_cannot_be_loaded_ends_the_server(tiny_folders: Folders) -> None:
    def no_engine() -> Any:
        raise MemoryError("cannot allocate 99 GiB")

    with running(tiny_engine(tiny_folders), start=no_engine) as server:
        until(lambda: server.server.exit_code == 1)
        assert isinstance(server.worker.fatal, MemoryError)


# --- keys


@pytest.fixture(scope="module")
def locked(tiny_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# ours\nfirst-key\n\nsecond-key\n")
    with running(tiny_engine(tiny_folders), api_key_file=file, max_messages=3, body_seconds=0.5) as server:
        yield server


def test_every_route_but_the_probes_wants_a_key(locked: Running) -> None:
    routes = [route for route in create_app(locked.handler).routes if isinstance(route, APIRoute)]
    paths = {route.path.replace("{model:path}", MODEL): sorted(route.methods or ())[0] for route in routes}
    paths |= {"/openapi.json": "GET", "/no/such/route": "GET", "/docs": "GET"}
    assert len(paths) >= 10
    for path, method in paths.items():
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
            response = httpx.request(method, locked.url + path, headers=headers)
            if path in ("/health", "/ready", "/live", "/metrics"):
                assert response.status_code == 200
            else:
                assert (path, response.status_code) == (path, 401)
                assert error(response)["code"] == "invalid_api_key"


def test_any_key_of_the_file_opens_it_and_holders_of_different_keys_share_no_prefix(locked: Running) -> None:
    def cached(key: str) -> int:
        response = post(locked.url, SHORT | {"prompt": [33] * 20}, headers={"Authorization": f"Bearer {key}"})
        count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached("first-key"), cached("second-key"), cached("first-key")] == [0, 0, 19]


# --- caps


def test_a_body_that_is_too_large_is_413_declared_or_not(served: Running) -> None:
    assert post(served.url, SHORT | {"user": "x" * 5_000_000}).status_code == 413

    def pieces() -> Iterator[bytes]:
        yield from (b" " * 100_000 for _ in range(60))

    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{served.url}/v1/completions", content=pieces(), headers=headers)
    assert response.status_code == 413
    assert post(served.url).status_code == 200


def answered(url: str, sent: bytes, seconds: float = 20.0) -> bytes:
    """All that a server answers until it closes the connection, read after everything was sent."""
    place = urlparse(url)
    with socket.create_connection((place.hostname, place.port or 80), timeout=seconds) as connection:
        connection.sendall(sent)
        found = b""
        while piece := connection.recv(65536):
            found += piece
        return found


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("key", [b"Authorization: Bearer first-key\r\n", b""], ids=["413", "401"])
def test_a_client_that_sends_all_of_its_body_before_it_reads_is_told_why_it_is_refused(
    locked: Running, key: bytes, request: pytest.FixtureRequest
) -> None:
    """urllib and HTTP/1.0 send `Connection: close`: a server that closes with bytes unread resets the connection."""
    size = 24_000_000
    head = HEAD + key + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size
    assert answered(locked.url, head + b" " * size).startswith(b"HTTP/1.1 " + request.node.callspec.id.encode())


def test_content_length_beside_transfer_encoding_is_400_and_the_end_of_the_connection(served: Running) -> None:
    """Else a second request could be hidden from a proxy in what it takes for the body of the first."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % (5 + len(hidden))
    found = answered(served.url, HEAD + both + b"0\r\n\r\n" + hidden)
    assert found.startswith(b"HTTP/1.1 400")
    assert b"Content-Length and Transfer-Encoding" in found
    assert found.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(("size", "status"), [(16_900, 431), (200_000, 400)])
def test_headers_that_are_too_large_are_refused(served: Running, size: int, status: int) -> None:
    place = urlparse(served.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    try:
        connection.request("GET", "/v1/models", headers={"X-Large": "x" * size})
        assert connection.getresponse().status == status
    except (BrokenPipeError, ConnectionResetError):
        assert status == 400
    assert post(served.url).status_code == 200


def test_a_body_that_does_not_come_is_408(locked: Running) -> None:
    place = urlparse(locked.url)
    with socket.create_connection((place.hostname, place.port or 80), timeout=10) as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first-key\r\n"
            b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v1/models HT",
        HEAD,
        # A body that is refused must not trickle in for ever, either; nor a second request after an answered one.
        HEAD + b"Content-Length: 9999999\r\n\r\n{",
        b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET /live HT",
    ],
    ids=["nothing", "half a line", "half a head", "half a refused body", "half a second head"],
)
def test_a_request_that_does_not_come_ends_its_connection(locked: Running, sent: bytes) -> None:
    before = time.monotonic()
    answered(locked.url, sent)
    assert time.monotonic() - before < 10  # `body_seconds` is 0.5 here


def test_too_many_messages_or_prompts_are_a_400(locked: Running, served: Running) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 4}
    headers = {"Authorization": "Bearer first-key"}
    response = httpx.post(f"{locked.url}/v1/chat/completions", json=body, headers=headers)
    assert (response.status_code, error(response)["param"]) == (400, "messages")
    response = post(served.url, SHORT | {"prompt": ["x"] * 17})
    assert (response.status_code, error(response)["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1}',
        b'{"model": "\\ud800", "prompt": "x", "max_tokens": 1}',
        b'{"model": "tiny", "prompt": [' + b"9" * 5000 + b"]}",
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"1" * 400 + b"}",
        b"[" * 100_000,
        b'{"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ' + b'{"a":' * 2000,
        b'{"model": "tiny", "prompt": "x", "max_tokens": 1, "max_tokens": 2}',
        b'{"model": "tiny", "prompt": "x", "response_format": {"type": "text", "type": "text"}}',
        b'{"model": "tiny", "prompt": [true]}',
        b'{"model": "tiny", "prompt": [1.0]}',
        b'{"model": "tiny", "prompt": [[1, true]]}',
        b'{"model": "tiny", "prompt": "x", "n": true}',
        b'{"model": "tiny", "prompt": "x", "n": "1"}',
        b'{"model": "tiny", "prompt": "x", "stream": "yes"}',
        b'{"model": "tiny", "prompt": "x", "stream": 1}',
        b'{"model": "tiny", "prompt": "x", "temperature": "0"}',
        b'{"model": "tiny", "prompt": "x", "temperature": false}',
        b'{"model": "tiny", "prompt": "x", "max_tokens": 2.0}',
        b'{"model": "tiny", "prompt": "x", "seed": 1.0}',
        b'{"model": "tiny", "prompt": "x", "stop_token_ids": [true]}',
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": true}}',
        b'{"model": "tiny",',
    ],
)
def test_what_is_no_request_is_a_4xx_in_openais_shape(served: Running, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{served.url}/v1/completions", content=content, headers=headers)
    assert 400 <= response.status_code < 500
    told = error(response)
    assert told["message"]
    if content.endswith(b","):  # broken JSON names no field
        assert (told["param"], told["code"]) == (None, "invalid_json")
        assert told["message"].startswith("the body is no JSON: ")


FLOODS: dict[str, dict[str, Any]] = {
    "wrong messages": {"messages": [1] * 2_000_000},
    "wrong content": {"messages": [{"role": "user", "content": [1] * 2_000_000}]},
    "stop": {"stop": [1] * 2_000_000},
    "logit_bias": {"logit_bias": {str(n): "a" for n in range(300_000)}},
    "fields": {f"{n:x}": 1 for n in range(350_000)},
    "messages": {"messages": [{"role": "user", "content": "x"}] * 100_000},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 120_000}]},
}
"""Bodies of almost 4 MiB, each value of which would be an error of its own, or costs time until it is found right."""


@pytest.mark.parametrize("name", FLOODS)
def test_a_body_of_many_values_is_refused_at_the_first_and_holds_up_no_probe(served: Running, name: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **FLOODS[name]}
    content, headers = json.dumps(body, separators=(",", ":")), {"Content-Type": "application/json"}
    before = time.process_time()  # of client and server together; other work on this machine does not count
    answer = httpx.post(f"{served.url}/v1/chat/completions", content=content, headers=headers, timeout=60)
    spent = time.process_time() - before
    assert answer.status_code == 400
    assert error(answer)["type"] == "invalid_request_error"
    assert len(answer.content) < 1_000
    # Measured: 0.3 s for `messages` and `parts`, whose validation alone takes 1.3 and 0.8 s; 0.9 s for `fields`.
    assert spent < (0.75 if name in ("messages", "parts") else 2)


def test_a_plain_curl_is_told_which_content_type_to_send(served: Running) -> None:
    """`curl -d` sends a form unless it is told otherwise; vLLM and SGLang want JSON, too."""
    given = json.dumps(SHORT)
    for headers in ({"Content-Type": "application/x-www-form-urlencoded"}, {}):
        response = httpx.post(f"{served.url}/v1/completions", content=given, headers=headers)
        assert response.status_code == 415
        assert "send it as `Content-Type: application/json`" in error(response)["message"]
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert httpx.post(f"{served.url}/v1/completions", content=given, headers=headers).status_code == 200


def test_unknown_routes_and_methods_have_errors_in_openais_shape(served: Running) -> None:
    for response in (httpx.get(f"{served.url}/nothing"), httpx.put(f"{served.url}/v1/models")):
        assert response.status_code in (404, 405)
        assert error(response)["message"]


# --- metrics


def test_the_metrics_speak_of_queue_latency_and_acceptance(served: Running) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    post(served.url, LONG)
    text = httpx.get(f"{served.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "num_requests_waiting",
        "num_requests_running",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "spec_decode_acceptance_length",
    ):
        assert families[f"dflash:{name}"].samples, name
    for name in ("steps", "slots_offered", "slots_accepted"):
        assert families[f"dflash_serve:{name}"].samples, name
    (length,) = families["dflash:spec_decode_acceptance_length"].samples
    assert length.value >= 1
    assert length.labels == {"model_name": MODEL}

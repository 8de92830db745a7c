from __future__ import annotations

import asyncio
import json
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import ServerSentEvent, SSEDecoder
from starlette.requests import ClientDisconnect
from starlette.types import Message

from dflash_serve.answers.engine import TokenLogprob
from dflash_torch.server.responses import TokenNames
from dflash_torch.server.routes import DONE, EventStream, ascii_json, unless_gone
from dflash_torch.server.worker import ResponseStream

HTTP = {"type": "http", "method": "POST"}


def completion(text: str) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": text}]}


class Client:
    """An ASGI client that may go away after so many messages, and may be slow to take each."""

    def __init__(self, stays_for: int = 0, seconds_each: float = 0) -> None:
        self.left, self.seconds_each, self.body = stays_for, seconds_each, b""
        self.headers: dict[bytes, bytes] = {}
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(self.seconds_each)
        self.headers |= dict(message.get("headers", ()))
        self.body += message.get("body", b"")
        self.left -= 1
        if self.left == 0:
            self.gone.set()


def sent(texts: Iterable[str], *, client_seconds: float = 0, gap: float = 0, ping: float = 0) -> Client:
    """What a real response sends for these texts: `gap` seconds before each, a comment after `ping` seconds."""

    async def events() -> AsyncIterator[str]:
        for text in texts:
            await asyncio.sleep(gap)
            yield ascii_json(completion(text))
        yield DONE

    async def run() -> Client:
        client = Client(seconds_each=client_seconds)
        await EventStream(events(), ResponseStream(lambda: None), ping_seconds=ping)(HTTP, client.receive, client.send)
        return client

    return asyncio.run(run())


def decoded(pieces: Iterable[bytes]) -> list[ServerSentEvent]:
    """As OpenAI's client reads them."""
    return list(SSEDecoder().iter_bytes(iter(pieces)))


def texts_of(events: list[ServerSentEvent]) -> list[str]:
    assert events[-1].data == "[DONE]"
    return [json.loads(event.data)["choices"][0]["text"] for event in events[:-1]]


@given(st.lists(st.text(), max_size=5), st.data())
def test_events_are_the_same_however_the_network_cuts_them(texts: list[str], data: st.DataObject) -> None:
    """Line separators of every kind included: U+2028, \\x0b, \\x85, \\r."""
    body = sent(texts).body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    assert texts_of(decoded(body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True))) == texts


@given(st.text())
def test_an_event_is_one_line_for_any_idea_of_a_line(text: str) -> None:
    body = sent([text]).body.decode("ascii")
    assert body == f"data: {ascii_json(completion(text))}\n\ndata: [DONE]\n\n"
    assert [len(event.splitlines()) for event in body.split("\n\n")[:-1]] == [1, 1]


def test_events_have_data_and_nothing_else() -> None:
    client = sent(["a", "b"])
    assert [(event.event, event.id, event.retry) for event in decoded([client.body])] == [(None, None, None)] * 3
    assert client.headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in client.headers


def test_comments_and_events_do_not_cut_each_other_for_a_slow_reader() -> None:
    texts = [str(number) for number in range(20)]
    body = sent(texts, client_seconds=0.01, gap=0.01, ping=0.02).body
    assert body.count(b": ping\n\n") >= 4
    assert texts_of(decoded([body])) == texts
    assert b"ping" not in sent(["a", "b"], gap=0.05, ping=0).body


@pytest.mark.parametrize("stays_for", range(1, 5))
def test_a_stream_is_over_exactly_once_whenever_the_client_goes(stays_for: int) -> None:
    over: list[bool] = []

    async def events() -> AsyncIterator[str]:
        yield "a"
        yield "b"
        await asyncio.sleep(0 if stays_for == 4 else 60)

    async def run() -> None:
        client, stream = Client(stays_for), ResponseStream(lambda: over.append(True))
        async with asyncio.timeout(5):
            await EventStream(events(), stream, ping_seconds=15)(HTTP, client.receive, client.send)

    asyncio.run(run())
    assert over == [True]


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_client_that_had_gone_before_or_a_server_that_goes_ends_the_stream(who: str) -> None:
    async def endless() -> AsyncIterator[str]:
        while True:
            yield "a"
            await asyncio.sleep(60)

    over: list[bool] = []

    async def run() -> None:
        client, stream = Client(), ResponseStream(lambda: over.append(True))
        if who == "client":
            client.gone.set()
        response: Any = EventStream(endless(), stream, ping_seconds=15)(HTTP, client.receive, client.send)
        task = asyncio.create_task(response)
        await asyncio.wait([task], timeout=0.2)
        assert task.done() is (who == "client")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert over == [True]


def test_work_for_a_client_that_has_gone_is_cancelled_and_its_own_error_is_the_callers() -> None:
    cancelled: list[bool] = []

    async def work(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            raise ValueError("x")
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        client = Client()
        with pytest.raises(ValueError, match="x"):
            await unless_gone(client.receive, work(0))
        asyncio.get_running_loop().call_later(0.01, client.gone.set)
        with pytest.raises(ClientDisconnect):
            await unless_gone(client.receive, work(60))
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind

    asyncio.run(run())
    assert cancelled == [True]


class Bytes:
    """Token bytes of a SentencePiece vocabulary: a word with its space, and an emoji in four tokens."""

    RAW = (b" quick", b"\xf0", b"\x9f", b"\xa6", b"\x8a", b"<end>")
    all_special_ids = (5,)

    def token_bytes(self, token: int) -> bytes:
        return self.RAW[token]

    def decode(self, tokens: list[int]) -> str:
        return self.RAW[tokens[0]].decode(errors="replace").strip()


def test_tokens_are_named_and_placed_by_their_bytes() -> None:
    fake: Any = Bytes()
    entries = [TokenLogprob(token, -1.0, ((1, -2.0), (2, -3.0))) for token in (0, 1, 2, 3, 4, 0, 5)]
    found = TokenNames(fake, fake).completion(entries, 0, getincrementaldecoder("utf-8")("replace"))
    assert found["tokens"] == [" quick", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x8a", " quick", "<end>"]
    assert found["text_offset"] == [0, 6, 6, 6, 6, 7, 13, 13]
    assert set(found["top_logprobs"][0]) == {" quick", "bytes:\\xf0", "bytes:\\x9f"}

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from dflash_torch.server.sse import DONE, EventStream, event, unless_gone
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from starlette.requests import ClientDisconnect
from starlette.types import Message

from dflash_torch.server.responses import Completion, CompletionChoice


def completion(text: str) -> Completion:
    choice = CompletionChoice(index=0, text=text, logprobs=None, finish_reason=None)
    return Completion(id="x", created=1, model="m", choices=[choice])


@given(st.lists(st.text(), max_size=5), st.data())
def test_events_are_the_same_however_the_network_cuts_them(texts: list[str], data: st.DataObject) -> None:
    """Line separators of every kind included: U+2028, \\x0b, \\x85, \\r."""
    body = b"".join(event(completion(text)) for text in texts) + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    events = [found.data for found in SSEDecoder().iter_bytes(iter(pieces))]
    assert events[-1] == "[DONE]"
    assert [json.loads(found)["choices"][0]["text"] for found in events[:-1]] == texts


@given(st.text())
def test_an_event_is_one_line_for_any_idea_of_a_line(text: str) -> None:
    assert len(event(completion(text)).decode("ascii").rstrip("\n").splitlines()) == 1


class Client:
    """An ASGI client that goes away after so many messages."""

    def __init__(self, stays_for: int) -> None:
        self.left, self.got = stays_for, b""
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.got += message.get("body", b"")
        self.left -= 1
        if self.left == 0:
            self.gone.set()


@pytest.mark.parametrize("stays_for", range(1, 5))
def test_a_stream_is_over_exactly_once_whenever_the_client_goes(stays_for: int) -> None:
    over: list[bool] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"
        await asyncio.sleep(0 if stays_for == 4 else 60)

    async def run() -> None:
        client = Client(stays_for)
        async with asyncio.timeout(5):
            await EventStream(events(), lambda: over.append(True))({}, client.receive, client.send)

    asyncio.run(run())
    assert over == [True]


def test_work_for_a_client_that_has_gone_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        client = Client(0)
        asyncio.get_running_loop().call_later(0.01, client.gone.set)
        with pytest.raises(ClientDisconnect):
            await unless_gone(client.receive, work())
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind

    asyncio.run(run())
    assert cancelled == [True]


def test_an_error_of_the_work_is_the_callers() -> None:
    async def work() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        asyncio.run(unless_gone(Client(0).receive, work()))

"""Many impatient clients at four times what the server holds: nothing lost, nothing twice, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from dflash_serve import SamplingParams
from dflash_torch.engine import EmbeddedEngine
from tests.support.embedded import answers, tiny_engine
from tests.support.serving import MODEL, Running, running, until

CLIENTS, REQUESTS = 64, 8
PROMPTS = [[10 + n, 20, 30 + n, 40] for n in range(8)]
MAX_TOKENS = 12
LEAK = 5 * 2**20
"""Bytes that 512 requests may leave behind: 10 kB each."""


def bodies() -> list[dict[str, object]]:
    """Greedy and seeded requests, streamed or not, some with a stop string."""
    common = {"model": MODEL, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [common | {"prompt": p, "temperature": t, "seed": 5} for p in PROMPTS for t in (0.0, 0.9)]


def solo(engine: EmbeddedEngine) -> list[str]:
    texts = []
    for body in bodies():
        fields = {name: body[name] for name in ("max_tokens", "ignore_eos", "temperature", "seed")}
        prompt: list[int] = body["prompt"]  # type: ignore[assignment]
        texts.append(answers(engine, [prompt], SamplingParams.model_validate(fields))[0].text)
    return texts


async def one_request(client: httpx.AsyncClient, which: int, dice: random.Random) -> tuple[str, str]:
    """(what happened, text); a client in three goes away at some moment."""
    body = bodies()[which] | {"stream": dice.random() < 0.5}
    patience = dice.choice([None, None, dice.random() * 0.3])
    try:
        async with asyncio.timeout(patience):
            response = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return "left", ""
    if response.status_code != 200:
        return str(response.status_code), ""
    return "answered", _text(response, bool(body["stream"]))


def _text(response: httpx.Response, stream: bool) -> str:
    import json

    if not stream:
        text: str = response.json()["choices"][0]["text"]
        return text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def load(url: str, expected: list[str], requests: int = REQUESTS) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def client(number: int) -> None:
            dice = random.Random(number)
            for _ in range(requests):
                which = dice.randrange(len(expected))
                outcome, text = await one_request(http, which, dice)
                outcomes[outcome] += 1
                if outcome == "answered":
                    assert text == expected[which]
                elif outcome == "429":
                    await asyncio.sleep(dice.random() * 0.1)

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return outcomes


def memory(server: Running) -> tuple[int, int]:
    scheduler = server.engine.scheduler
    return scheduler.cache.keys.untyped_storage().nbytes(), len(scheduler.free_entries)


def resident() -> int:
    """Bytes of this process in memory: server and clients alike."""
    gc.collect()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


@pytest.mark.thorough
def test_under_four_times_its_capacity_every_request_has_one_true_outcome(tiny_folders: tuple[Path, Path]) -> None:
    expected = solo(tiny_engine(tiny_folders, max_batch_size=1))
    with running(tiny_engine(tiny_folders, max_batch_size=8), queue=32) as server:
        before = memory(server)
        asyncio.run(load(server.url, expected, requests=4))  # allocators and caches reach their size
        until(server.idle)
        settled = resident()
        outcomes = asyncio.run(load(server.url, expected))
        assert outcomes.total() == CLIENTS * REQUESTS
        assert set(outcomes) <= {"answered", "left", "429"}
        assert outcomes["answered"] > 100
        assert outcomes["left"] > 20
        until(server.idle)
        assert memory(server) == before
        assert resident() - settled < LEAK
        seen = httpx.get(f"{server.url}/metrics").text
        joined = server.engine.scheduler.joined - 1  # the warm-up
        ended = [line for line in seen.splitlines() if line.startswith("dflash:request_success_total")]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in ended) == joined

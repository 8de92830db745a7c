"""Tokens per second over HTTP, servers in turns: speculation off, a fixed width of B and `width: auto`.

    python -m benchmarks.served [--users 1,2,4,8,16,32,64] [--ways off,fixed,auto] [--turns 12] [--output FILE]

Each way has its own server, and all servers get the same requests at once: `users` clients each, which send their next
prompt (HumanEval, answers of 32 to 128 tokens, greedy, streamed) as soon as an answer is complete. Only one server runs
at a time, for some seconds. Then it is stopped (SIGSTOP) and the next one continues, in another order every time. So a
busy spell of the machine slows all alike; a way's speed is all tokens over all seconds of its turns. `dflash-serve
bench` measures one run after another instead, and needs no access to the server's process.

A step during which a server is stopped looks long to it: one in twenty to a hundred. The first turns are not counted.
Prompts repeat, and prefixes are reused, as at a server.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import httpx
import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.turns import ANSWERS, Turn, show, summary, write_report
from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import LookingBackend, ServerBackend
from dflash_serve.adapter.registry import server_backend
from dflash_serve.bench.settings import deployed_variants
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import ServerReading, read_server
from dflash_serve.deployment.description import Deployment
from tests.support.prompts import Messages, human_eval

PROMPTS = 160
WARM_UP = 3
"""First turns of every way; they are not counted."""


class Server(NamedTuple):
    """The server of one way, and its process."""

    url: str
    model: str
    pid: int

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)


def main(
    users: Annotated[str, typer.Option(help="Users at once, comma-separated.")] = "1,2,4,8,16,32,64",
    ways: Annotated[str, typer.Option(help="off, fixed, auto or widths, comma-separated.")] = "off,fixed,auto",
    turns: Annotated[int, typer.Option(help="Turns of every way, beside those of the warm-up.")] = 12,
    seconds: Annotated[float, typer.Option(help="Seconds of one turn.")] = 5.0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    backend: Annotated[
        str, typer.Option(help="torch, sglang or vllm; on a GPU these two take one way at a time.")
    ] = "torch",
    target: Annotated[str, typer.Option(help="Target.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Drafter.")] = "smollm2",
    output: Annotated[Path | None, typer.Option(help="File for the JSON.")] = None,
) -> None:
    """Measure all ways side by side."""
    sizes = [int(size) for size in users.split(",")]
    deployment = Deployment.model_validate(
        {
            "target": {"model": target},
            "drafter": {"model": drafter},
            "hardware": {"gpu": None if torch.cuda.is_available() else "none", "dtype": dtype},
            "limits": {"max_batch_size": max(sizes), "max_model_len": 1024},
        }
    )
    results = []
    with ExitStack() as stack:
        servers, env = start(deployment, ways.split(","), server_backend(backend), stack)
        for size in sizes:
            found = asyncio.run(Load(servers, size, seconds).turns(turns))
            results.append({"users": size, **summary(found)})
    show(results, "tokens/s over HTTP, in turns")
    write_report({"dtype": dtype, "turns": turns, "seconds": seconds}, results, output, servers=dict(env))


def start(
    deployment: Deployment, ways: list[str], backend: ServerBackend, stack: ExitStack
) -> tuple[dict[str, Server], Mapping[str, str]]:
    """A stopped server for each way, and the environment of all; they end with `stack`."""
    servers: dict[str, Server] = {}
    folder = Path(stack.enter_context(TemporaryDirectory()))
    env = backend.look() if isinstance(backend, LookingBackend) else {}
    for way, variant in deployed_variants(deployment, ways, backend).items():
        before = _children()
        url = stack.enter_context(running_server(backend, variant, folder / way.replace(" ", "-"), env=env))
        (pid,) = _children() - before
        servers[way] = Server(url, Endpoint(url).served_model, pid)
        stack.callback(servers[way].go_on)  # a stopped process does not receive SIGTERM
        servers[way].stop()
    return servers, env


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class Load:
    """`users` clients at every server."""

    def __init__(self, servers: dict[str, Server], users: int, seconds: float) -> None:
        self.servers, self.users, self.seconds = servers, users, seconds
        self.prompts = human_eval(PROMPTS)

    async def turns(self, count: int) -> dict[str, list[Turn]]:
        """`count` turns of every way, after those of the warm-up."""
        found: dict[str, list[Turn]] = {way: [] for way in self.servers}
        order, chance = list(self.servers), Random(self.users)
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=unlimited) as client:
            asking = [asyncio.create_task(self._ask(client, server)) for server in self.servers.values()]
            for turn in track(range(WARM_UP + count), f"{self.users} users", console=Console(stderr=True)):
                chance.shuffle(order)
                for way in order:
                    done = await self._turn(self.servers[way])
                    for task in asking:
                        if task.done():
                            task.result()  # it ends only with an error
                    if turn >= WARM_UP:
                        found[way].append(done)
            for server in self.servers.values():
                server.go_on()
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            for server in self.servers.values():
                while (await _reading(server)).running:  # before the next clients come
                    await asyncio.sleep(0.1)
                server.stop()
        return found

    async def _turn(self, server: Server) -> Turn:
        server.go_on()
        before = await _reading(server)
        await asyncio.sleep(self.seconds)
        after = await _reading(server)
        server.stop()
        assert before.generated is not None
        assert after.generated is not None
        return Turn(after.generated - before.generated, after.seconds - before.seconds)

    async def _ask(self, client: httpx.AsyncClient, server: Server) -> None:
        work = self._work()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.users):
                group.create_task(_user(client, server, work))

    def _work(self) -> Iterator[tuple[Messages, int]]:
        chance = Random(self.users)
        while True:
            yield chance.choice(self.prompts), chance.randint(*ANSWERS)


async def _user(client: httpx.AsyncClient, server: Server, work: Iterator[tuple[Messages, int]]) -> None:
    for messages, tokens in work:
        body: dict[str, Any] = {"model": server.model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                pass


async def _reading(server: Server) -> ServerReading:
    return await asyncio.to_thread(read_server, server.url)


if __name__ == "__main__":
    typer.run(main)

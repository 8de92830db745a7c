"""Tokens per second over HTTP, servers in turns: speculation off, a fixed width of B and `width: auto`.

    python -m benchmarks.served [--users 1,2,4,8,16,32,64] [--ways off,fixed,auto] [--turns 12] [--output FILE]

Each way has a server of its own, and all are asked the same at once: `users` clients each, who send their next prompt
(HumanEval, in an order of its own for every number of users, answers of 32 to 128 tokens, greedy, streamed) as soon as
an answer is whole. But only one server runs at a time, for some seconds; then it is stopped (SIGSTOP) where it is, and
the next one goes on, in another order every time. So a busy spell of the machine slows all alike, and no round is too
short to tell one per cent: a way's speed is all tokens over all seconds of its turns. `dflash-serve bench`, whose runs
are one after the other, cannot do that, but needs no access to the servers.

A step that is stopped half-way looks minutes long to a server; one in twenty to a hundred is. The first turns are not
counted. Prompts come back now and then, and prefixes are reused, as a server does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.decoding import measured_on, write_report
from benchmarks.turns import Turn, show, summary
from dflash_serve.bench.settings import deployed_variants
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import ServerReading, read_server
from dflash_serve.common.processes import running_server
from dflash_serve.common.provenance import versions
from dflash_serve.deployment import Deployment
from dflash_torch.backend import EmbeddedBackend
from tests.support.prompts import Messages, human_eval

PROMPTS = 160
ANSWERS = 32, 128
"""Tokens of the shortest and of the longest: users should not stay in step."""
WARM_UP = 3
"""Turns of every way that are not counted."""


class Server(NamedTuple):
    """One way's, and its process."""

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
    turns: Annotated[int, typer.Option(help="Of every way, beside those of the warm-up.")] = 12,
    seconds: Annotated[float, typer.Option(help="Of one turn.")] = 5.0,
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Likewise.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure all ways side by side."""
    sizes = [int(size) for size in users.split(",")]
    deployment = Deployment.model_validate(
        {
            "target": {"model": target},
            "drafter": {"model": drafter},
            "hardware": {"gpu": "none", "dtype": dtype},
            "limits": {"max_batch_size": max(sizes), "max_model_len": 1024},
        }
    )
    results = []
    with ExitStack() as stack:
        servers, env = start(deployment, ways.split(","), stack)
        for size in sizes:
            found = asyncio.run(Load(servers, size, seconds).turns(turns))
            results.append({"users": size, **summary(found)})
    report = {
        "environment": measured_on() | {"servers": dict(env)},
        "versions": versions("torch", "dflash-serve"),
        "load": {"target": target, "drafter": drafter, "dtype": dtype, "turns": turns, "seconds": seconds},
        "results": results,
    }
    show(results, "tokens/s over HTTP, in turns")
    write_report(report, output)


def start(deployment: Deployment, ways: list[str], stack: ExitStack) -> tuple[dict[str, Server], Mapping[str, str]]:
    """A server for each way, stopped, and the environment that all have; they end with `stack`."""
    backend, servers = EmbeddedBackend(), {}
    folder, env = Path(stack.enter_context(TemporaryDirectory())), backend.look()
    for way, variant in deployed_variants(deployment, ways, backend).items():
        before = _children()
        url = stack.enter_context(running_server(backend, variant, folder / way.replace(" ", "-"), env=env))
        (pid,) = _children() - before
        servers[way] = Server(url, Endpoint(url).served_model, pid)
        stack.callback(servers[way].go_on)  # one that is stopped does not hear that it is to end
        servers[way].stop()
    return servers, env


def _children() -> set[int]:
    """Of this thread: it starts the servers."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class Load:
    """So many users at every server."""

    def __init__(self, servers: dict[str, Server], users: int, seconds: float) -> None:
        self.servers, self.users, self.seconds = servers, users, seconds
        self.prompts = human_eval(PROMPTS)

    async def turns(self, count: int) -> dict[str, list[Turn]]:
        """`count` turns of every way, behind those of the warm-up."""
        found: dict[str, list[Turn]] = {way: [] for way in self.servers}
        order, luck = list(self.servers), Random(self.users)
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=unlimited) as client:
            asking = [asyncio.create_task(self._ask(client, server)) for server in self.servers.values()]
            for turn in track(range(WARM_UP + count), f"{self.users} users", console=Console(stderr=True)):
                luck.shuffle(order)
                for way in order:
                    done = await self._turn(self.servers[way])
                    for task in asking:
                        if task.done():
                            task.result()  # it only ends by what is wrong
                    if turn >= WARM_UP:
                        found[way].append(done)
            for server in self.servers.values():
                server.go_on()
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            for server in self.servers.values():
                await _until_idle(server)
                server.stop()
        return found

    async def _turn(self, server: Server) -> Turn:
        with running(server):
            before = await _reading(server)
            await asyncio.sleep(self.seconds)
            after = await _reading(server)
        assert before.generated is not None
        assert after.generated is not None
        return Turn(after.generated - before.generated, after.seconds - before.seconds)

    async def _ask(self, client: httpx.AsyncClient, server: Server) -> None:
        """All users of one server; each takes the next of the same prompts."""
        work = self._work()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.users):
                group.create_task(_user(client, server, work))

    def _work(self) -> Iterator[tuple[Messages, int]]:
        luck = Random(self.users)
        while True:
            yield luck.choice(self.prompts), luck.randint(*ANSWERS)


async def _user(client: httpx.AsyncClient, server: Server, work: Iterator[tuple[Messages, int]]) -> None:
    for messages, tokens in work:
        body: dict[str, Any] = {"model": server.model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                pass


async def _until_idle(server: Server) -> None:
    """Its users have gone; so must their requests, before others come."""
    while (await _reading(server)).running:
        await asyncio.sleep(0.1)


async def _reading(server: Server) -> ServerReading:
    return await asyncio.to_thread(read_server, server.url)


@contextmanager
def running(server: Server) -> Iterator[None]:
    """It goes on until the block ends."""
    server.go_on()
    try:
        yield
    finally:
        server.stop()


if __name__ == "__main__":
    typer.run(main)

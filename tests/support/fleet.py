"""Several servers of an engine, each started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Generic, TypeVar

import pytest

from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError

Server = TypeVar("Server")
Engine = TypeVar("Engine", bound=ServerBackend)
Serve = Callable[[Path, Deployment, Engine], AbstractContextManager[Server]]
"""Starts a server of a deployment in a folder, and ends it with the block."""


@dataclass(frozen=True)
class Berth(Generic[Server]):
    """A server's place among several."""

    ready: Future[Server] = field(default_factory=Future)
    left: Event = field(default_factory=Event)
    """Set it when the server is no longer needed: it is stopped."""


@dataclass
class Fleet(Generic[Server]):
    """Servers by name, each in a folder of its own."""

    folder: Path
    wanted: Mapping[str, Callable[[Path], AbstractContextManager[Server]]]
    ahead: int
    pool: ThreadPoolExecutor
    berths: dict[str, Berth[Server]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Berth[Server]:
        names = list(self.wanted)
        first = names.index(name)
        for near in names[first : first + 1 + self.ahead]:
            if near not in self.berths:
                self.berths[near] = Berth()
                self.pool.submit(self._run, near)
        return self.berths[name]

    def _run(self, name: str) -> None:
        berth = self.berths[name]
        try:
            with self.wanted[name](self.folder / str(list(self.wanted).index(name))) as server:
                berth.ready.set_result(server)
                berth.left.wait()
        except UserError as error:
            berth.ready.set_exception(error)


def ahead(config: pytest.Config) -> int:
    """Servers to start beside one: none in a run of selected tests, which may never ask for the next."""
    return 0 if config.option.markexpr or config.option.keyword else 1


def _started(
    serve: Serve[Engine, Server], deployment: Deployment, backend: Engine, folder: Path
) -> AbstractContextManager[Server]:
    return serve(folder, deployment, backend)


@contextmanager
def fleet(
    serve: Serve[Engine, Server], folder: Path, wanted: Mapping[str, tuple[Deployment, Engine]], *, ahead: int = 1
) -> Iterator[Fleet[Server]]:
    """All of them are gone when the block ends.

    Args:
        wanted: the deployment and the backend of each, by name.
        ahead: servers that are started beside the one that is asked for, the next ones in this order: most of a start
            is one thread that imports.
    """
    with ThreadPoolExecutor(len(wanted)) as pool:
        starting = {name: partial(_started, serve, *how) for name, how in wanted.items()}
        servers = Fleet(folder, starting, ahead, pool)
        try:
            yield servers
        finally:
            for berth in servers.berths.values():
                berth.left.set()

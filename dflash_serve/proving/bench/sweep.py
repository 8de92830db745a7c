"""Runs what is missing of a sweep, in order, and keeps each run as soon as it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from dflash_serve.backend import ServerBackend
from dflash_serve.client.engine_metrics import read_acceptance
from dflash_serve.common.provenance import commit, now
from dflash_serve.proving.bench.aiperf import Aiperf, Job
from dflash_serve.proving.bench.plan import Cell, Sweep, schedule
from dflash_serve.proving.bench.results import Run, RunFolder
from dflash_serve.proving.bench.servers import model_of, served
from dflash_serve.proving.bench.ways import Way

RUNS, WORK = "runs", "work"
"""Folders of the output: finished runs, and what aiperf and the servers leave behind, which nobody needs later."""


class Sweeper:
    """One sweep over ways.

    Args:
        aiperf: the load generator.
        ways: what is compared.
        sweep: how much is measured.
        backend: starts the servers of ways that have none; None = all run.
        output: its folder.
        in_turn: one server at a time.
        warm_up: each server answers a request for each user before it is measured.
        tell: gets each finished run, and how many are done of how many.
    """

    def __init__(
        self,
        aiperf: Aiperf,
        ways: Sequence[Way],
        sweep: Sweep,
        backend: ServerBackend | None,
        output: Path,
        *,
        in_turn: bool,
        warm_up: bool = True,
        tell: Callable[[Run, int, int], None],
    ) -> None:
        self.aiperf, self.sweep, self.backend, self.work = aiperf, sweep, backend, output / WORK
        self.ways = {way.name: way for way in ways}
        self.folder, self.in_turn, self.warm_up, self.tell = RunFolder(output / RUNS), in_turn, warm_up, tell
        self.cells = schedule(list(self.ways), sweep, in_turn=in_turn)
        self._urls: dict[str, tuple[str, str]] = {}

    def missing(self) -> list[Cell]:
        """Runs that are not kept yet, in order."""
        done = {run.cell for run in self.folder.runs()}
        return [cell for cell in self.cells if cell not in done]

    def run(self) -> None:
        """Measures what is missing.

        Raises:
            UserError: a server or aiperf failed; finished runs are kept.
        """
        with ExitStack() as servers:
            for cell in self.missing():
                if cell.way not in self._urls:
                    if self.in_turn:
                        servers.close()
                        self._urls.clear()
                    self._start(self.ways[cell.way], servers)
                run = self._measure(cell)
                self.folder.keep(run, self.ways[cell.way].slug)
                self.tell(run, len(self.cells) - len(self.missing()), len(self.cells))

    def _start(self, way: Way, servers: ExitStack) -> None:
        url = servers.enter_context(served(way, self.backend, self.work / f"{way.slug}.server.log"))
        model = model_of(url, self.aiperf.api_key)
        if self.warm_up:
            users = max(self.sweep.concurrencies)
            self.aiperf.run(Job(url, model, users, users, self.work / f"{way.slug}-warm-up"))
        self._urls[way.name] = url, model

    def _measure(self, cell: Cell) -> Run:
        url, model = self._urls[cell.way]
        name = f"{self.ways[cell.way].slug}-c{cell.concurrency:03d}-r{cell.round + 1}"
        job = Job(url, model, cell.concurrency, self.sweep.requests(cell.concurrency), self.work / name)
        started, before = now(), read_acceptance(url, api_key=self.aiperf.api_key)
        figures = self.aiperf.run(job)
        acceptance = read_acceptance(url, api_key=self.aiperf.api_key).since(before)
        return Run(
            way=cell.way,
            concurrency=cell.concurrency,
            round=cell.round,
            acceptance=acceptance,
            started=started,
            commit=commit(),
            **figures.model_dump(),
        )

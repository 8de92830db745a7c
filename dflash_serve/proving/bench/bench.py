"""A bench as a whole: runs what is missing of it, and reports what there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.backend import ServerBackend
from dflash_serve.common.provenance import environment
from dflash_serve.errors import UserError
from dflash_serve.proving.bench.aiperf import Aiperf, find_aiperf
from dflash_serve.proving.bench.dataset import Dataset
from dflash_serve.proving.bench.identity import claim
from dflash_serve.proving.bench.plan import Sweep, Workload
from dflash_serve.proving.bench.processes import terminated_like_interrupted
from dflash_serve.proving.bench.report import Report, write_report
from dflash_serve.proving.bench.results import Run, points
from dflash_serve.proving.bench.sentence import headline
from dflash_serve.proving.bench.sweep import WORK, Sweeper
from dflash_serve.proving.bench.ways import Way

TOGETHER = "rounds over all concurrencies, at each all ways in turn, another one first each time; servers side by side"
IN_TURN = "rounds over all ways, one server at a time, for each all concurrencies; another way first in each round"


@dataclass(frozen=True)
class Bench:
    """What is compared, on what, and where it is kept."""

    ways: Sequence[Way]
    dataset: Dataset
    workload: Workload
    sweep: Sweep
    output: Path
    backend: ServerBackend | None = None
    """Starts the servers of ways that have a deployment."""
    tokenizer: str | None = None
    """A folder or hub id; None = of the model's name."""
    api_key: str | None = None
    in_turn: bool = False
    """One server at a time, for servers that take all of a GPU's memory. Otherwise all run side by side: a server
    that nobody asks waits, and costs memory only."""
    warm_up: bool = True
    """Each server answers a request for each user before it is measured."""
    baseline: str | None = None
    interactivity: float | None = None
    hardware: str | None = None
    devices: int = 1

    @property
    def compared_with(self) -> str:
        """The baseline: the one that was named, else `off`, else the first."""
        names = [way.name for way in self.ways]
        return self.baseline or ("off" if "off" in names else names[0])

    def run(self, tell: Callable[[Run, int, int], None]) -> list[Path]:
        """Measures what is missing, then writes the report.

        Args:
            tell: gets each run as it ends, and how many are done of how many.

        Returns:
            The report's files.

        Raises:
            UserError: the folder is another bench's, a server or aiperf failed; finished runs are kept.
            KeyboardInterrupt: likewise; a report of them is written.
        """
        claim(self.output, self.workload, self.backend.name if self.backend else None, self.ways)
        sweeper = self._sweeper(tell)
        try:
            with terminated_like_interrupted():
                if sweeper.missing():
                    find_aiperf()  # before minutes of starting servers
                    sweeper.run()
        except (UserError, KeyboardInterrupt):
            if sweeper.folder.runs():
                self.report(sweeper)
            raise
        return self.report(sweeper)

    def report(self, sweeper: Sweeper) -> list[Path]:
        """Writes the report of the runs that are there."""
        planned = set(sweeper.cells)
        runs = [run for run in sweeper.folder.runs() if run.cell in planned]
        found = points(runs, self.devices, [way.name for way in self.ways])
        comparison, sentence = headline(
            found, baseline=self.compared_with, way=None, interactivity=self.interactivity, device="device"
        )
        local = any(way.url is None for way in self.ways)
        report = Report(
            title=self._title(),
            sentence=sentence,
            comparison=comparison,
            baseline=self.compared_with,
            points=found,
            served=self._served(runs),
            workload=self.workload,
            sweep=self.sweep,
            environment=environment(self.hardware, local=local),
            commits=list(dict.fromkeys(run.commit for run in runs if run.commit)),
            dates=sorted({run.started[:10] for run in runs}),
            order=IN_TURN if self.in_turn else TOGETHER,
            warm_up=self.warm_up,
            device="device",
            devices=self.devices,
            done=len(runs),
            planned=len(planned),
            local=local,
        )
        return write_report(report, self.output)

    def _sweeper(self, tell: Callable[[Run, int, int], None]) -> Sweeper:
        work = self.output / WORK
        work.mkdir(exist_ok=True)
        aiperf = Aiperf(self.dataset.arguments(work), self.workload, self.tokenizer, self.api_key)
        return Sweeper(
            aiperf,
            self.ways,
            self.sweep,
            self.backend,
            self.output,
            in_turn=self.in_turn,
            warm_up=self.warm_up,
            tell=tell,
        )

    def _title(self) -> str:
        deployed = [way.deployment.target.model for way in self.ways if way.deployment is not None]
        return deployed[0] if deployed else ", ".join(way.name for way in self.ways)

    def _served(self, runs: Sequence[Run]) -> list[tuple[str, str]]:
        engines = {way.name: next((r.acceptance.engine for r in runs if r.way == way.name), None) for way in self.ways}
        told: list[tuple[str, str]] = []
        deployed = next((way.deployment for way in self.ways if way.deployment is not None), None)
        if deployed is not None:
            drafter = deployed.drafter.model if deployed.drafter is not None else "none"
            told += [("Target", deployed.target.model), ("Drafter", drafter)]
            started = [way.name for way in self.ways if way.deployment is not None]
            told.append(("Ways", f"{', '.join(started)}; engine: {engines[started[0]] or 'unknown'}"))
            told.append(
                ("Limits", f"{deployed.limits.max_batch_size} users at once, {deployed.hardware.dtype} arithmetic")
            )
        for way in self.ways:
            if way.url is not None:
                told.append((f"“{way.name}”", f"{way.url}; engine: {engines[way.name] or 'unknown'}"))
        return told

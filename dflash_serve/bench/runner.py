"""Makes the missing runs of a bench in order, keeps each as soon as it ends, and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from dflash_serve.backend import LookingBackend
from dflash_serve.bench.aiperf import Aiperf, Job, RequestSettings, find_aiperf, load_dataset
from dflash_serve.bench.report import ReportData, write_report
from dflash_serve.bench.results import Run, Runs
from dflash_serve.bench.settings import Cell, Settings, find_variants, read_deployment, schedule, slug
from dflash_serve.checkpoint.source import target_source
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.common.http import read_api_key
from dflash_serve.common.processes import sigterm_interrupts
from dflash_serve.common.provenance import commit, environment, now
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.server_adapter import running_server

WORK = "work"
"""Folder of the output for the files of aiperf and the servers; not needed later."""


class Bench:
    """One bench, in one folder.

    Args:
        settings: what is asked for.

    Raises:
        UserError: a mistake in the settings; nothing is written then.
    """

    def __init__(self, settings: Settings) -> None:
        deployment, self.told = read_deployment(settings)
        self.settings, self.work = settings, settings.output / WORK
        self.variants, self.backend = find_variants(settings, deployment)
        self.dataset = load_dataset(settings.dataset)
        self.request = RequestSettings(
            dataset=self.dataset.name,
            prompts_sha256=self.dataset.sha256,
            output_tokens=settings.max_tokens,
            ignore_eos=settings.ignore_eos,
            temperature=settings.temperature,
        )
        self.api_key = read_api_key(settings.api_key_file)
        own = str(target_source(deployment.target.model)) if deployment is not None else None
        self.tokenizer = settings.tokenizer or own
        self.runs: Runs | None = None
        """Finished runs; None until the bench runs, so that a mistake in the settings writes nothing."""
        self.cells = schedule(list(self.variants), settings)
        self.env: Mapping[str, str] = {}
        """Environment of all servers that the bench starts."""

    def run(self, report_run: Callable[[Run, int, int], None]) -> list[Path]:
        """Measures what is missing, then writes the report.

        Args:
            report_run: gets each run as it ends, and how many are done of how many.

        Returns:
            The report's files.

        Raises:
            UserError: the folder cannot be used, a server or aiperf failed; finished runs are kept.
            KeyboardInterrupt: finished runs are kept, and a report of them is written.
        """
        name = self.backend.name if self.backend is not None else None
        self.runs = Runs(self.settings.output, self.request, name, self.variants)
        for variant, why in self.runs.changed.items():
            print(f"{variant}: its runs were made with other settings ({why}); measured anew", file=sys.stderr)
        try:
            with sigterm_interrupts():
                if self.missing():
                    find_aiperf()  # before minutes of starting servers
                    self.measure(report_run)
        except (UserError, KeyboardInterrupt):
            if self.finished():
                write_report(self.report(), self.settings.output)
            raise
        return write_report(self.report(), self.settings.output)

    def finished(self) -> list[Run]:
        """Runs that are kept."""
        return self.runs.all() if self.runs is not None else []

    def missing(self) -> list[Cell]:
        """Runs that are not kept yet, in order."""
        done = {run.cell for run in self.finished()}
        return [cell for cell in self.cells if cell not in done]

    def measure(self, report_run: Callable[[Run, int, int], None]) -> None:
        """Makes the runs that are missing.

        Raises:
            UserError: a server or aiperf failed.
        """
        assert self.runs is not None
        self.work.mkdir(parents=True, exist_ok=True)
        aiperf = Aiperf(self.dataset, self.request, self.tokenizer, self.api_key)
        self.env = self.backend.look() if isinstance(self.backend, LookingBackend) else {}
        running: dict[str, Endpoint] = {}
        with ExitStack() as servers:
            for cell in self.missing():
                if cell.variant not in running:
                    if self.settings.one_at_a_time:
                        servers.close()
                        running.clear()
                    running[cell.variant] = self._start(cell.variant, servers, aiperf)
                run = self._measure(cell, running[cell.variant], aiperf)
                self.runs.keep(run)
                report_run(run, len(self.cells) - len(self.missing()), len(self.cells))

    def report(self) -> ReportData:
        """The report of the runs that are finished."""
        planned = set(self.cells)
        return ReportData(
            settings=self.settings,
            request=self.request,
            variants=self.variants,
            runs=[run for run in self.finished() if run.cell in planned],
            planned=len(planned),
            environment=environment(self.settings.hardware, local=self.backend is not None),
        )

    def _start(self, name: str, servers: ExitStack, aiperf: Aiperf) -> Endpoint:
        # A server that the bench starts ends with `servers`.
        url = self.variants[name]
        if isinstance(url, Deployment):
            assert self.backend is not None
            folder = self.work / f"{slug(name)}.server"
            url = servers.enter_context(running_server(self.backend, url, folder, env=self.env))
        endpoint = Endpoint(url, api_key=self.api_key)
        if self.settings.warm_up:
            users = max(self.settings.concurrency)
            folder = self.work / f"{slug(name)}-warm-up"
            aiperf.run(Job(url, endpoint.served_model, users, users, folder, first=-users))
        return endpoint

    def _measure(self, cell: Cell, server: Endpoint, aiperf: Aiperf) -> Run:
        requests = self.settings.requests(cell.concurrency)
        first = self.settings.prompts_before(cell)
        job = Job(server.base, server.served_model, cell.concurrency, requests, self.work / cell.slug, first)
        started, before = now(), read_acceptance(server.base, api_key=self.api_key)
        figures = aiperf.run(job)
        acceptance = read_acceptance(server.base, api_key=self.api_key).since(before)
        made = {"acceptance": acceptance, "started": started, "commit": commit()}
        return Run(**cell._asdict(), **made, **figures.model_dump())

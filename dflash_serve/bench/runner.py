"""Makes the missing runs of a bench in order, keeps each as soon as it ends, and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import LookingBackend
from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.bench.aiperf import Aiperf, Job, RequestSettings, find_aiperf, load_dataset
from dflash_serve.bench.results import ReportData, Run, write_report
from dflash_serve.bench.settings import (
    BenchSettings,
    Cell,
    endpoint_variants,
    find_variants,
    metrics_urls,
    read_deployment,
    require_servers,
    schedule,
    slug,
)
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.files import require_writable
from dflash_serve.common.http import read_api_key
from dflash_serve.common.processes import sigterm_interrupts
from dflash_serve.common.progress import doing
from dflash_serve.common.provenance import commit, environment, now
from dflash_serve.common.reports import counted
from dflash_serve.common.store import Store
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.errors import UserError

RUNS, WORK = "runs", "work"
"""Folders of the output: finished runs, and the files of aiperf and the servers, which are not needed later."""


class Bench:
    """One bench, in one folder.

    Args:
        start: gives a variant's server, in place of a server of the bench's own.

    Attributes:
        local: servers run on this machine, whose hardware the report names.

    Raises:
        UserError: a mistake in the settings; nothing is written then.
    """

    def __init__(
        self,
        settings: BenchSettings,
        start: Callable[[str, Deployment], AbstractContextManager[Endpoint]] | None = None,
    ) -> None:
        deployment, self.told = read_deployment(settings)
        self.settings, self.work, self.start = settings, settings.output / WORK, start
        self.variants, self.backend = find_variants(settings, deployment)
        self.local = self.backend is not None
        self.metrics_urls = metrics_urls(settings.metrics_url, endpoint_variants(settings.endpoint))
        self.dataset = load_dataset(settings.dataset)
        self.request = RequestSettings(
            dataset=self.dataset.name,
            prompts_sha256=self.dataset.sha256,
            output_tokens=settings.max_tokens,
            ignore_eos=settings.ignore_eos,
            temperature=settings.temperature,
            chat_template_kwargs=settings.chat_template_kwargs,
        )
        self.api_key = read_api_key(settings.api_key_file)
        tokenizer = deployment.target if deployment else None
        if settings.tokenizer:
            tokenizer = Model(model=settings.tokenizer)
        self.aiperf = Aiperf(self.dataset, self.request, tokenizer, self.api_key)
        self.cells = schedule(list(self.variants), settings)
        self.stores: dict[str, Store] = {}
        """Finished runs by variant; empty until the bench runs, so that a mistake in the settings writes nothing."""
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
        if self.start is None and not (self.settings.output / RUNS).exists():
            find_aiperf()
            require_servers(self.settings)  # before folders are made
        self.open_stores()
        try:
            with sigterm_interrupts():
                if self._missing():
                    find_aiperf()  # before minutes of starting servers
                    self._measure_missing(report_run)
        except (UserError, KeyboardInterrupt):
            if self.finished():
                write_report(self.report(), self.settings.output)
            raise
        return write_report(self.report(), self.settings.output)

    def finished(self) -> list[Run]:
        """Runs that are kept, made with this bench's settings.

        Raises:
            UserError: a run of another version.
        """
        found = []
        for store in self.stores.values():
            try:
                found += [Run.model_validate(value) for value in store.values.values()]
            except ValidationError:
                raise UserError("not runs of this version", where=str(store.path), do="remove it") from None
        return found

    def open_stores(self) -> None:
        """Reads the finished runs that the folder has.

        Raises:
            UserError: it cannot be used.
        """
        folder = self.settings.output / RUNS
        require_writable(folder)
        for name, variant in self.variants.items():
            made_by = {
                "request": self.request.model_dump(mode="json"),
                "backend": self.backend.name if self.backend is not None else None,
                "variant": variant.model_dump(mode="json") if isinstance(variant, Deployment) else variant,
            }
            self.stores[name] = store = Store(folder / f"{slug(name)}.jsonl", made_by)
            if store.changed:
                told = f"its runs were made with other settings ({store.changed}); measured anew"
                print(f"{name}: {told}", file=sys.stderr)

    def _missing(self) -> list[Cell]:
        done = {run.cell for run in self.finished()}
        return [cell for cell in self.cells if cell not in done]

    def _measure_missing(self, report_run: Callable[[Run, int, int], None]) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        if self.start is None and isinstance(self.backend, LookingBackend):
            self.env = self.backend.look()
        running, missing = dict[str, Endpoint](), self._missing()
        with doing("runs", len(missing)) as work, ExitStack() as servers:
            for cell in missing:
                if cell.variant not in running:
                    if self.settings.one_at_a_time:
                        servers.close()
                        running.clear()
                    running[cell.variant] = self._start(cell.variant, servers)
                with doing(f"measuring {cell.variant}, {counted(cell.concurrency, 'user')}"):
                    run = self._measure(cell, running[cell.variant])
                work.advance()
                self.stores[run.variant].put(f"c{run.concurrency}-r{run.round + 1}", run.model_dump(mode="json"))
                report_run(run, len(self.cells) - len(self._missing()), len(self.cells))

    def report(self) -> ReportData:
        """BenchSettings and finished runs, of which all figures are made."""
        planned = set(self.cells)
        return ReportData(
            settings=self.settings,
            request=self.request,
            variants=self.variants,
            runs=[run for run in self.finished() if run.cell in planned],
            planned=len(planned),
            environment=environment(self.settings.hardware, local=self.local),
        )

    def _start(self, name: str, servers: ExitStack) -> Endpoint:
        endpoint = self._server(name, servers)
        if endpoint.metrics_urls:
            endpoint.metrics.require()
        if self.settings.warm_up:
            users = max(self.settings.concurrency)
            folder = self.work / f"{slug(name)}-warm-up"
            with doing(f"warming up the server of {name}"):
                self.aiperf.run(Job(endpoint.base, endpoint.served_model, users, users, folder, first=-users))
        return endpoint

    def _server(self, name: str, servers: ExitStack) -> Endpoint:
        # A server that the bench starts ends with `servers`.
        url = self.variants[name]
        if isinstance(url, Deployment) and self.start is not None:
            return servers.enter_context(self.start(name, url))
        if isinstance(url, Deployment):
            assert self.backend is not None
            folder = self.work / f"{slug(name)}.server"
            url = servers.enter_context(running_server(self.backend, url, folder, env=self.env))
        return Endpoint(url, api_key=self.api_key, metrics_urls=self.metrics_urls.get(name, ()))

    def _measure(self, cell: Cell, server: Endpoint) -> Run:
        requests = self.settings.requests(cell.concurrency)
        first = self.settings.prompts_before(cell)
        started, before = now(), server.metrics.read()
        # An own server's answers tell their acceptance as vLLM's do, where they are asked to: aiperf reads it.
        more = {"acceptance_metrics": "summary"} if before.engine == embedded_backend().facts.title else {}
        job = Job(server.base, server.served_model, cell.concurrency, requests, self.work / cell.slug, first, more)
        figures = self.aiperf.run(job)
        after = server.metrics.read()
        acceptance = after.since(before)
        if after.engine is None and figures.told is not None:
            acceptance = figures.told
        made = {"acceptance": acceptance, "workers": after.by_worker(before), "started": started, "commit": commit()}
        return Run(**cell._asdict(), **made, **dict(figures))

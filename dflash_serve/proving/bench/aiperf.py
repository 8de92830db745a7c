"""aiperf, NVIDIA's load generator, as a command: one run of it, and the figures it wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_serve.errors import UserError
from dflash_serve.proving.bench.plan import Workload
from dflash_serve.proving.bench.processes import ended
from dflash_serve.proving.bench.results import Figures

RESULT = "profile_export_aiperf.json"
KEY = "OPENAI_API_KEY"
"""Where aiperf looks for one."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Job:
    """One run."""

    url: str
    model: str
    concurrency: int
    requests: int
    folder: Path
    """Where aiperf leaves its files."""


def find_aiperf() -> list[str]:
    """How aiperf is started: from this environment, or from wherever PATH finds it.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("aiperf") is not None:
        return [sys.executable, "-m", "aiperf"]
    found = shutil.which("aiperf")
    if found is None:
        do = "pip install 'dflash-serve[bench]', or aiperf in an environment of its own, on PATH"
        raise UserError("not installed", where="aiperf", do=do)
    return [found]


@dataclass(frozen=True)
class Aiperf:
    """aiperf with what is the same in all runs."""

    dataset: Sequence[str]
    """Its flags for the prompts."""
    workload: Workload
    tokenizer: str | None
    """A folder or a hub id; None = of the model's name."""
    api_key: str | None = None

    def run(self, job: Job) -> Figures:
        """Runs to the end.

        Raises:
            UserError: aiperf failed, or every request did; aiperf's own last words are in it.
        """
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        log = job.folder / "aiperf.log"
        with log.open("wb") as out:
            child = subprocess.Popen(  # noqa: S603 - argv, no shell
                self.argv(job), env=self.environment(), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            with ended(child):
                code = child.wait()
        result = job.folder / RESULT
        if code != 0 or not result.is_file():
            raise UserError(f"failed with exit code {code} ({_last_error(log)})", where="aiperf", do=f"see {log}")
        return figures(json.loads(result.read_text(encoding="utf-8")), where=str(result))

    def argv(self, job: Job) -> list[str]:
        """The command line: token counts are the server's own."""
        more = {"temperature": self.workload.temperature} | ({"ignore_eos": True} if self.workload.ignore_eos else {})
        return [
            *(*find_aiperf(), "profile", "--model", job.model, "--url", job.url),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--use-legacy-max-tokens"),
            *(*self.dataset, "--dataset-sampling-strategy", "sequential", "--random-seed", "0"),
            *("--osl", str(self.workload.output_tokens), "--extra-inputs", json.dumps(more)),
            *("--concurrency", str(job.concurrency), "--request-count", str(job.requests)),
            *(["--tokenizer", self.tokenizer] if self.tokenizer else []),
            *("--no-gpu-telemetry", "--no-server-metrics", "--export-level", "summary", "--ui", "none"),
            *("--artifact-dir", str(job.folder)),
        ]

    def environment(self) -> dict[str, str]:
        """Ours, with the key where no process list shows it."""
        env = {name: value for name, value in os.environ.items() if name != KEY}  # not somebody else's key
        if self.api_key:
            env[KEY] = self.api_key
        if self.tokenizer and Path(self.tokenizer).is_dir():
            for name in OFFLINE:  # with it aiperf 0.13 takes a folder for a hub id; a folder needs no hub anyway
                env.pop(name, None)
        return env


def figures(report: Mapping[str, Any], *, where: str) -> Figures:
    """The figures of aiperf's JSON export (schema 1.4).

    Raises:
        UserError: no request was answered.
    """

    def get(name: str, statistic: str = "avg") -> float | None:
        metric = report.get(name)
        value = metric.get(statistic) if isinstance(metric, Mapping) else None
        return float(value) if isinstance(value, int | float) else None

    requests, seconds, tokens = get("request_count"), get("benchmark_duration"), get("total_output_tokens")
    throughput = get("output_token_throughput")
    errors = sum(int(entry.get("count", 0)) for entry in report.get("error_summary") or [])
    if not requests or seconds is None or tokens is None or throughput is None:
        raise UserError(f"no request was answered, {errors} failed ({_first_failure(report)})", where=where)
    return Figures(
        requests=int(requests),
        errors=errors,
        output_tokens=tokens,
        seconds=seconds,
        throughput=throughput,
        interactivity=get("output_token_throughput_per_user", "p50"),  # a burst at the end of one answer spoils a mean
        first_token_ms=get("time_to_first_token", "p50"),
        first_token_p99_ms=get("time_to_first_token", "p99"),
        inter_token_ms=get("inter_token_latency", "p50"),
    )


def _first_failure(report: Mapping[str, Any]) -> str:
    for entry in report.get("error_summary") or []:
        details = entry.get("error_details") or {}
        return " ".join(str(details.get("message") or details)[:200].split())
    return "no reason given"


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if "Error" in line or "ERROR" in line]
    return " ".join((said or lines or ["it said nothing"])[-1].split())[:300]

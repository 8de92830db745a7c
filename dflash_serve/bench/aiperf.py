"""aiperf, NVIDIA's load generator, as a command: its prompts, one run, and the figures of its report."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue

from dflash_serve.answers.prompts import HUB, HUMAN_EVAL, hub_options, hub_prompts, human_eval_prompts, jsonl_prompts
from dflash_serve.checkpoint.source import target_source
from dflash_serve.common.documents import read_json
from dflash_serve.common.files import sha256
from dflash_serve.common.processes import run_command
from dflash_serve.common.settings import Frozen, PositiveInt
from dflash_serve.deployment.description import Model
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics

RESULT = "profile_export_aiperf.json"
KEY = "OPENAI_API_KEY"
"""Environment variable from which aiperf reads the API key."""
LOOKS_PER_SECOND = 1000
"""Rate at which aiperf polls for finished requests. Without a rate aiperf 0.13 polls in a busy loop
(timing/strategies/request_rate.py), which takes a whole core from servers on the same machine."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
AIPERF_FILES, AIPERF_PUBLIC = "speed_bench_", ("spec_al_", "spec_bench")
LENGTHS = "pooled_spec_decode_acceptance_histogram"
SYNTHETIC = {"synthetic", "random", "sonnet", "shakespeare"}


@dataclass(frozen=True)
class Dataset:
    """Either prompts, or the flags of one of aiperf's own loaders."""

    name: str
    prompts: tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    source: Path | None = None
    """The file that aiperf's loader reads; None = it fetches its own."""

    @property
    def sha256(self) -> str | None:
        """Checksum of the prompts, or of the file that aiperf reads; None where aiperf fetches its own."""
        if self.prompts is not None:
            return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        return None if self.source is None else sha256(self.source)

    def arguments(self, folder: Path, first: int = 0) -> list[str]:
        """aiperf's flags for it; prompts of ours are written into `folder`, from the `first` on and round again."""
        if self.prompts is None:
            return list(self.flags)
        path, start = folder / "prompts.jsonl", first % len(self.prompts)
        prompts = (*self.prompts[start:], *self.prompts[:start])
        lines = (json.dumps({"text": prompt}, ensure_ascii=False) for prompt in prompts)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["--input-file", str(path), "--custom-dataset-type", "single_turn"]


def load_dataset(text: str) -> Dataset:
    """The dataset that `--dataset` names.

    Args:
        text: FILE.jsonl of {"prompt": ...} lines; `humaneval`; `hf:ORG/NAME,subset=...,split=...,column=...`;
            `speed_bench_coding=FILE.jsonl` and aiperf's other SPEED-Bench loaders; `spec_al_gsm8k` and the like,
            which aiperf fetches.

    Raises:
        UserError: synthetic prompts, a file that cannot be read, an unknown name.
    """
    name, _, rest = text.partition("=")
    where = f"--dataset {text}"
    if text.lower() in SYNTHETIC:
        raise UserError(
            "made-up prompts mislead: a drafter is not asked what users ask, so acceptance, and with it throughput, "
            "comes out wrong (random tokens overestimate throughput by about 23 %: SPEED-Bench, arXiv:2604.09557)",
            where=where,
            do=f"give a JSONL file of real prompts, {HUMAN_EVAL}, or a SPEED-Bench file",
        )
    if text.startswith(HUB):
        repository, options = hub_options(text, where)
        return Dataset(repository, tuple(hub_prompts(repository, where=where, **options)))
    if name.startswith(AIPERF_FILES):
        source = Path(rest)
        if not source.is_file():
            do = "give speed_bench_CATEGORY=FILE.jsonl; specdec_bench of NVIDIA's Model-Optimizer fetches the prompts"
            raise UserError(f"cannot be read ({rest or 'no file given'})", where=f"--dataset {name}", do=do)
        flags = ("--input-file", rest, "--custom-dataset-type", name)
        return Dataset(f"SPEED-Bench, {name.removeprefix(AIPERF_FILES)}", flags=flags, source=source)
    if text.startswith(AIPERF_PUBLIC):
        return Dataset(text, flags=("--public-dataset", text))
    if text == HUMAN_EVAL:
        return Dataset("HumanEval", tuple(human_eval_prompts(where)))
    do = f"give FILE.jsonl, {HUMAN_EVAL}, hf:ORG/NAME or speed_bench_coding=FILE.jsonl"
    return Dataset(Path(text).name, tuple(jsonl_prompts(Path(text), where=where, do=do)))


class RequestSettings(Frozen):
    """Settings of every request. Runs with different settings are never compared."""

    dataset: str
    prompts_sha256: str | None
    """None where aiperf fetches the prompts itself."""
    output_tokens: PositiveInt
    """Length of the longest answer; with `ignore_eos`, of every answer."""
    ignore_eos: bool
    temperature: Annotated[float, Field(ge=0)]
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})


class Figures(Frozen):
    """Figures of one run of aiperf. An unknown figure is None."""

    requests: int
    """Requests that were answered."""
    errors: int
    cut: int = 0
    """Answered requests whose streams ended early, without the usage that is a stream's last event. Their tokens are
    not counted. SGLang's router ends the streams of a dead worker so."""
    output_tokens: float
    seconds: float
    throughput: float
    """Output tokens/s of the server."""
    interactivity: float | None
    """Tokens/s that one user sees while an answer comes: the median of 1 / inter-token latency over requests."""
    first_token_ms: float | None  # medians, like inter_token_ms
    first_token_p99_ms: float | None
    inter_token_ms: float | None
    told: AcceptanceStatistics | None = None
    """Acceptance by the answers: aiperf's section for speculation (vLLM's `metrics.speculative_decoding`), else their
    usage (OpenAI's fields for predicted tokens); None = they do not tell."""


@dataclass(frozen=True)
class Job:
    """Settings that differ between runs of aiperf."""

    url: str
    model: str
    concurrency: int
    requests: int
    folder: Path
    """Folder for aiperf's files."""
    first: int = 0
    """Index of the first prompt. Each run has its own prompts: a server may have cached earlier prefixes."""
    more: Mapping[str, JsonValue] = field(default_factory=dict)
    """Further fields of its requests."""


def find_aiperf() -> list[str]:
    """The command that starts aiperf: from this environment, else from PATH.

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
    """aiperf with the settings that all runs share."""

    dataset: Dataset
    request: RequestSettings
    tokenizer: Model | None
    """The model whose tokenizer it loads; None = that of the model's name."""
    api_key: str | None = None

    def run(self, job: Job) -> Figures:
        """Runs aiperf to its end.

        Raises:
            UserError: aiperf failed, or every request did; aiperf's own last words are in it.
        """
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        log, result = job.folder / "aiperf.log", job.folder / RESULT
        code = run_command(self.argv(job), log, env=self.environment())
        if code != 0 or not result.is_file():
            named = (
                "" if self.tokenizer else "; it looks for a tokenizer of the model's name: --tokenizer names another"
            )
            raise UserError(f"failed with exit code {code} ({_error(log)})", where="aiperf", do=f"see {log}{named}")
        return read_figures(read_json(result), where=str(result))

    def argv(self, job: Job) -> list[str]:
        """The command line; token counts are the server's own."""
        optional = {"ignore_eos": self.request.ignore_eos, "chat_template_kwargs": self.request.chat_template_kwargs}
        given = {name: value for name, value in optional.items() if value}
        more = {"temperature": self.request.temperature, **given, **job.more}
        return [
            *(*find_aiperf(), "profile", "--model", job.model, "--url", job.url),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--use-legacy-max-tokens"),
            *(*self.dataset.arguments(job.folder, job.first), "--dataset-sampling-strategy", "sequential"),
            *("--random-seed", "0"),
            *("--osl", str(self.request.output_tokens), "--extra-inputs", json.dumps(more)),
            *("--concurrency", str(job.concurrency), "--request-count", str(job.requests)),
            *("--request-rate", str(LOOKS_PER_SECOND), "--arrival-pattern", "constant"),
            *self._tokenizer(),
            *("--no-gpu-telemetry", "--no-server-metrics", "--export-level", "summary", "--ui", "none"),
            *("--artifact-dir", str(job.folder)),
        ]

    def _tokenizer(self) -> list[str]:
        if self.tokenizer is None:
            return []
        source, revision = str(target_source(self.tokenizer.model)), self.tokenizer.revision
        at = [] if revision is None or Path(source).is_dir() else ["--tokenizer-revision", revision]
        return ["--tokenizer", source, *at]

    def environment(self) -> dict[str, str]:
        """The environment of aiperf. The key is in it, so that no process list shows it."""
        env = {name: value for name, value in os.environ.items() if name != KEY}  # it may belong to another server
        if self.api_key:
            env[KEY] = self.api_key
        if self.tokenizer and Path(target_source(self.tokenizer.model)).is_dir():
            for name in OFFLINE:  # offline, aiperf 0.13 takes a folder for a hub id
                env.pop(name, None)
        return env


def read_figures(export: Mapping[str, Any], *, where: str) -> Figures:
    """The figures of aiperf's JSON export (schema 1.4).

    Raises:
        UserError: no request was answered.
    """

    def get(name: str, statistic: str = "avg") -> float | None:
        metric = export.get(name)
        value = metric.get(statistic) if isinstance(metric, Mapping) else None
        return float(value) if isinstance(value, int | float) else None

    whole = get("usage_completion_tokens", "count")
    requests, seconds, tokens = get("request_count"), get("benchmark_duration"), get("total_output_tokens")
    throughput = get("output_token_throughput")
    failed = export.get("error_summary") or []
    errors = sum(int(entry.get("count", 0)) for entry in failed)
    if not requests or seconds is None or tokens is None or throughput is None:
        details = next((entry.get("error_details") or {} for entry in failed), {})
        why = " ".join(str(details.get("message") or details or "no reason given")[:200].split())
        raise UserError(f"no request was answered, {errors} failed ({why})", where=where)
    return Figures(
        requests=int(requests),
        errors=errors,
        cut=0 if whole is None else max(0, int(requests - whole)),
        output_tokens=tokens,
        seconds=seconds,
        throughput=throughput,
        interactivity=get("output_token_throughput_per_user", "p50"),  # a burst at the end of one answer spoils a mean
        first_token_ms=get("time_to_first_token", "p50"),
        first_token_p99_ms=get("time_to_first_token", "p99"),
        inter_token_ms=get("inter_token_latency", "p50"),
        told=_acceptance(export, get, whole or requests),
    )


def _acceptance(
    export: Mapping[str, Any], get: Callable[[str], float | None], answers: float
) -> AcceptanceStatistics | None:
    # The section has a histogram of steps by accepted drafts; the widths of the steps are not in it.
    lengths = {int(length): float(steps) for length, steps in (export.get(LENGTHS) or {}).items()}
    if (drafted := get("total_draft_tokens")) is not None and lengths:
        by_slot = [sum(n for length, n in lengths.items() if length >= slot) for slot in range(1, max(lengths) + 1)]
        return AcceptanceStatistics(sum(lengths.values()), drafted, sum(by_slot), None, by_slot, None)
    names = (f"{kind}_tokens" for kind in ("completion", "accepted_prediction", "rejected_prediction"))
    tokens, accepted, rejected = (get(f"total_usage_{name}") for name in names)
    if tokens is None or accepted is None or rejected is None:
        return None
    return AcceptanceStatistics.of_usage(tokens, accepted, rejected, answers)  # of those that have usage


def _error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if "ERROR" in line][:1]  # the cause; what follows from it comes after
    said = said or [line for line in lines if "Error" in line]
    return " ".join((said or lines or ["it said nothing"])[-1].split())[:300]

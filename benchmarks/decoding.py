"""Single-stream decoding, four ways in turns on the same prompts and weights (fp32 on CPU, bf16 on CUDA):

(a) Hugging Face `generate`, (b) z-lab's `dflash_generate`, (c) ours without speculation, (d) ours with it.

    python benchmarks/decoding.py [--prompts 20] [--tokens 128] [--output benchmarks/results/decoding.json]

Each prompt runs through all four before the next begins, so a busy spell of the machine slows all alike. A prompt's
time is the whole call, prefill included. Writes a table and JSON.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import drafter_source, target_folder
from dflash_serve.common.provenance import commit, processor, versions
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_torch.engine import EmbeddedEngine
from tests.support.prompts import Messages, human_eval, word_problems

Ids = list[int]
WAYS = {
    "a": "Hugging Face generate",
    "b": "z-lab dflash_generate",
    "c": "ours, no speculation",
    "d": "ours, width auto",
}


Way = Callable[[Ids], Ids]


def main(
    prompts: Annotated[int, typer.Option(help="Prompts of each task.")] = 10,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure the four ways side by side."""
    bench = Bench(tokens)
    tasks = {"word problems": word_problems(prompts), "HumanEval": human_eval(prompts)}
    bench.run(tasks["word problems"][0])  # warm-up, not counted
    rows = [
        {"task": task, **bench.run(messages)}
        for task, many in tasks.items()
        for messages in track(many, f"{task}: four ways in turns")
    ]
    report = {
        "environment": measured_on(),
        "versions": versions("torch", "transformers", "dflash", "dflash-serve"),
        "load": {"target": "SmolLM2-135M-Instruct", "dtype": bench.dtype, "batch": 1, "tokens": tokens},
        "results": [summary(task, [row for row in rows if row["task"] == task]) for task in tasks],
        "prompts": rows,
    }
    show(report)
    write_report(report, output)


class Bench:
    """The four ways, loaded once."""

    def __init__(self, tokens: int) -> None:
        from dflash.model import DFlashDraftModel, dflash_generate
        from transformers import AutoModelForCausalLM

        self.tokens = tokens
        self.llm = LLM("smollm2", "smollm2", max_batch_size=1)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.dtype = str(dtype).removeprefix("torch.")
        assert isinstance(self.llm.engine, EmbeddedEngine)
        self.engine, self.plain = self.llm.engine, self.llm.engine.plain()
        for engine in (self.engine, self.plain):  # the others compute every prompt whole, so we do
            engine.scheduler.cache_manager.reuse = False
        self.reference = AutoModelForCausalLM.from_pretrained(target_folder("smollm2"), dtype=dtype).to(self.device)
        self.drafter = DFlashDraftModel.from_pretrained(drafter_source("smollm2"), dtype=dtype).to(self.device)
        self.dflash_generate = dflash_generate
        self.statistics = AcceptanceStatistics()
        self.ways: dict[str, Way] = {"a": self.a, "b": self.b, "c": self.c, "d": self.d}

    def run(self, messages: Messages) -> dict[str, Any]:
        """Tokens per second of each way on one prompt, whether all agree, and what (d) accepted."""
        ids = self.engine.tokenize(messages)
        speeds, answers = {}, {}
        for name, way in self.ways.items():
            start = perf_counter()
            answers[name] = way(ids)
            speeds[name] = len(answers[name]) / (perf_counter() - start)
        agree = all(answer == answers["a"] for answer in answers.values())
        return {"tokens_per_second": speeds, "same_tokens": agree, "acceptance": self.statistics.to_dict()}

    def a(self, ids: Ids) -> Ids:
        prompt = torch.tensor([ids], device=self.device)
        out = self.reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=self.tokens, do_sample=False
        )
        return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    def b(self, ids: Ids) -> Ids:
        prompt = torch.tensor([ids], device=self.device)
        stops = list(self.engine.scheduler.target.config.eos_token_ids)
        out = self.dflash_generate(self.drafter, self.reference, prompt, self.tokens, stop_token_ids=stops)
        return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    def c(self, ids: Ids) -> Ids:
        stream = self.plain.stream([ids], [self._params])
        for _ in stream:
            pass
        return stream.outputs()[0].token_ids

    def d(self, ids: Ids) -> Ids:
        output = self.llm.generate(ids, self._params)[0]
        self.statistics = output.statistics
        return output.token_ids

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.tokens)


def summary(task: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over prompts; a ratio is the median of the prompts' own ratios, each measured side by side."""
    speeds = {way: median(row["tokens_per_second"][way] for row in rows) for way in WAYS}
    pairs = {"c/a": ("c", "a"), "d/b": ("d", "b"), "d/c": ("d", "c"), "d/a": ("d", "a")}
    ratios = {
        name: median(row["tokens_per_second"][x] / row["tokens_per_second"][y] for row in rows)
        for name, (x, y) in pairs.items()
    }
    accepted = total(AcceptanceStatistics.from_dict(row["acceptance"]) for row in rows)
    return {
        "task": task,
        "prompts": len(rows),
        "same_tokens": sum(row["same_tokens"] for row in rows),
        "tokens_per_second": speeds,
        "ratios": ratios,
        "acceptance_length": accepted.acceptance_length,
        "tokens_per_step": accepted.tokens_per_step,
        "widths": accepted.widths,
    }


def measured_on() -> dict[str, str | int]:
    """Processor or GPU, cores, threads, waiting policy, Python and commit."""
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        "commit": commit() or "unknown",
    }


def write_report(report: dict[str, Any], output: Path | None) -> None:
    """The JSON, in a folder that is made; None = nowhere."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")


def show(report: dict[str, Any]) -> None:
    """The table on the terminal."""
    table = Table("task", *WAYS.values(), "c/a", "d/b", "d/c", "τ", "same tokens", title="tokens/s, medians")
    for row in report["results"]:
        speeds = [f"{speed:.1f}" for speed in row["tokens_per_second"].values()]
        ratios = [f"{row['ratios'][name]:.2f}" for name in ("c/a", "d/b", "d/c")]
        length = row["acceptance_length"]
        shown = "off" if length is None else f"{length:.2f}"
        table.add_row(row["task"], *speeds, *ratios, shown, f"{row['same_tokens']} of {row['prompts']}")
    console = Console()
    console.print(table)
    console.print(report["environment"])


if __name__ == "__main__":
    typer.run(main)

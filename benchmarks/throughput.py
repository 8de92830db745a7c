"""Tokens per second against concurrency, up to four ways in turns on the same prompts and weights.

(a) no speculation, (b) a fixed width of B, (c) `width: auto`, (d) Hugging Face `generate` with the same batch.

    python -m benchmarks.throughput [--concurrency 1,2,4,8,16,32,64] [--ways off,fixed,auto,hf] [--rounds 3]

At concurrency c, c requests start together and each makes exactly `--tokens` tokens (greedy, the end of sequence
ignored), so every way does the same work; prefill is included, prefix reuse is off. The first three answer at once, a
step of each in turn; Hugging Face before them in one round and after them in the next. Figures are medians over rounds,
`auto_over_better` and its like of the rounds' own ratios.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.decoding import measured_on, write_report
from benchmarks.turns import in_turns
from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.common.provenance import versions
from dflash_serve.outputs import RequestOutput
from dflash_serve.speculation.statistics import total
from dflash_torch.engine import EmbeddedEngine
from tests.support.prompts import word_problems

Ids = list[int]
WAYS = {"off": "off", "fixed": "fixed B", "auto": "auto", "hf": "HF"}


def main(
    concurrency: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,2,4,8,16,32,64",
    tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 96,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 3,
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Likewise.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "auto",
    ways: Annotated[str, typer.Option(help="Which ways, comma-separated.")] = "off,fixed,auto",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure the four ways side by side."""
    sizes = [int(size) for size in concurrency.split(",")]
    chosen = [way for way in WAYS if way in ways.split(",")]
    bench = Bench(target, drafter, chosen, tokens=tokens, most=max(sizes), dtype=dtype)
    bench.round(min(sizes), 0)  # warm-up, not counted
    results = []
    for size in sizes:
        measured = [bench.round(size, number) for number in track(range(rounds), f"concurrency {size}")]
        results.append({"concurrency": size, **summary(measured)})
    report = {
        "environment": measured_on(),
        "versions": versions("torch", "transformers", "dflash-serve"),
        "load": {"target": target, "drafter": drafter, "dtype": bench.dtype, "tokens": tokens, "rounds": rounds},
        "results": results,
    }
    show(report)
    write_report(report, output)


class Bench:
    """The four ways, loaded once: one set of weights of ours, one of theirs."""

    def __init__(
        self, target: str, drafter: str, ways: list[str], *, tokens: int, most: int, dtype: str = "auto"
    ) -> None:
        llm = LLM(target, drafter, max_batch_size=most, max_model_len=1024, dtype=dtype)
        assert isinstance(llm.engine, EmbeddedEngine)
        full, block_size = llm.engine, llm.engine.block_size
        assert block_size is not None
        self.tokens, self.dtype = tokens, full.dtype
        ours = {"off": full.plain(), "fixed": full.fixed(block_size), "auto": full}
        self.engines = {way: engine for way, engine in ours.items() if way in ways}
        for engine in self.engines.values():
            engine.scheduler.cache_manager.reuse = False  # every round has the same prompts
        self.reference = _reference(target, full.scheduler.target.embedding) if "hf" in ways else None
        self.prompts = [full.tokenize(prompt) for prompt in word_problems(20)]

    def round(self, size: int, number: int) -> dict[str, dict[str, Any]]:
        """Each way once, on the same `size` prompts."""
        prompts = [self.prompts[n % len(self.prompts)] for n in range(size)]
        figures: dict[str, dict[str, Any]] = {}
        for part in (self._ours, self._hugging_face) if number % 2 else (self._hugging_face, self._ours):
            figures |= part(prompts, number)
        return figures

    def _ours(self, prompts: list[Ids], number: int) -> dict[str, dict[str, Any]]:
        params = [SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)] * len(prompts)
        streams = {way: engine.stream(prompts, params) for way, engine in self.engines.items()}
        seconds = in_turns(streams, number)
        return {way: self._figures(stream.outputs(), seconds[way]) for way, stream in streams.items()}

    def _figures(self, outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
        assert all(len(output.token_ids) == self.tokens for output in outputs)
        statistics = total(output.statistics for output in outputs)
        return {
            "tokens_per_second": len(outputs) * self.tokens / seconds,
            "acceptance_length": statistics.acceptance_length,
            "tokens_per_step": statistics.tokens_per_step,
        }

    @torch.inference_mode()
    def _hugging_face(self, prompts: list[Ids], _: int) -> dict[str, dict[str, Any]]:
        if self.reference is None:
            return {}
        longest, device = max(map(len, prompts)), self.reference.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        length = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens}
        start = perf_counter()
        out = self.reference.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
        written = out.cpu()[:, longest:].numel()  # waits for the device
        seconds = perf_counter() - start
        assert written == len(prompts) * self.tokens
        return {"hf": {"tokens_per_second": written / seconds}}


def _reference(target: str, embedding: torch.Tensor) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder(target), dtype=embedding.dtype)
    return model.to(embedding.device).eval()


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians of speeds, and of the rounds' own ratios, whose ways ran side by side."""
    speeds = [{way: figures["tokens_per_second"] for way, figures in measured.items()} for measured in rounds]
    ways = [way for way in WAYS if way in speeds[0]]
    pairs = {"auto_over_better": ("off", "fixed"), "auto_over_off": ("off",), "auto_over_hf": ("hf",)}
    ratios = {
        name: median(speed["auto"] / max(speed[other] for other in others) for speed in speeds)
        for name, others in pairs.items()
        if {"auto", *others} <= set(ways)
    }
    last = {way: rounds[-1][way] for way in ("fixed", "auto") if way in ways}
    return {
        "tokens_per_second": {way: median(speed[way] for speed in speeds) for way in ways},
        "all_rounds": {way: [speed[way] for speed in speeds] for way in ways},
        **ratios,
        "acceptance_length": {way: figures["acceptance_length"] for way, figures in last.items()},
        "tokens_per_step": {way: figures["tokens_per_step"] for way, figures in last.items()},
    }


def show(report: dict[str, Any]) -> None:
    """A row a concurrency."""
    first = report["results"][0]
    ways, names = list(first["tokens_per_second"]), [name for name in first if name.startswith("auto_over")]
    table = Table(title=f"Tokens per second, {report['load']['target']}, {report['load']['dtype']}")
    for head in ("at once", *(WAYS[way] for way in ways), *(name.replace("_", " ") for name in names), "τ fixed"):
        table.add_column(head, justify="right")
    for row in report["results"]:
        speeds = [f"{row['tokens_per_second'][way]:.1f}" for way in ways]
        length = row["acceptance_length"].get("fixed")
        shown = "unknown" if length is None else f"{length:.2f}"
        table.add_row(str(row["concurrency"]), *speeds, *(f"{row[name]:.3f}" for name in names), shown)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

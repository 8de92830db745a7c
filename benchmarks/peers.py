"""Other ways to run the same model on this machine, in turns on the same prompts: tokens/s and time to first token.

    python -m benchmarks.peers [--users 1,4,16,32] [--dtype float32] [--rounds 3] [--output FILE]
    python -m benchmarks.peers --ways HF --server llama.cpp=http://127.0.0.1:8080

In this process: ours without speculation and with `width: auto`; Hugging Face `generate` over one padded batch; z-lab's
`dflash_generate`, one request at a time. A `--server` is any running OpenAI-compatible server with the same weights;
say how it was started: `--note NAME="llama-server -m model-f32.gguf -t 2 -np 32"`. Every answer has exactly `--tokens`
tokens (greedy, the end of sequence ignored); prompts are computed whole. Rounds are interleaved and each begins with
another way. Figures are medians over rounds, the time to first token over users too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.turns import write_report
from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import drafter_source, target_folder
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_torch.engine import EmbeddedEngine
from tests.support.prompts import word_problems

Ids = list[int]


class Timed(NamedTuple):
    """Number of tokens of all answers, each user's seconds to the first of them, and the answers where known."""

    tokens: int
    first: list[float]
    answers: list[Ids]


Way = Callable[[list[Ids]], Timed]


def main(
    users: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,4,16,32",
    tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 96,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of all that runs in this process.")] = "float32",
    server: Annotated[list[str] | None, typer.Option(help="NAME=URL of a running server; repeatable.")] = None,
    note: Annotated[list[str] | None, typer.Option(help="NAME=how it was started; kept in the report.")] = None,
    ways: Annotated[str, typer.Option(help="Ways beside ours, comma-separated.")] = "HF,z-lab",
    output: Annotated[Path | None, typer.Option(help="File for the JSON.")] = None,
) -> None:
    """Measure all ways side by side."""
    sizes = [int(size) for size in users.split(",")]
    bench = Bench(tokens, max(sizes), dtype)
    bench.ways = {name: way for name, way in bench.ways.items() if name.startswith("ours") or name in ways.split(",")}
    for given in server or []:
        name, _, url = given.partition("=")
        bench.ways[name] = Server(url, bench.engine, tokens)
    prompts = [bench.engine.tokenize(prompt) for prompt in word_problems(20)]
    names, results = list(bench.ways), []
    for size in sizes:
        asked = [prompts[n % len(prompts)] for n in range(size)]
        bench.round(asked, names)  # warm-up, not counted
        turns = [n % len(names) for n in range(rounds)]
        measured = [bench.round(asked, names[n:] + names[:n]) for n in track(turns, f"{size} users")]
        results.append({"users": size, **summary(measured, names)})
    notes = dict(text.partition("=")[::2] for text in note or [])
    table = Table("users", "way", "tokens/s", "first token, s", "ours, off / it", "ours, auto / it")
    for row in results:
        for name, speed in row["tokens_per_second"].items():
            ratios = (f"{row[ratio][name]:.2f}" for ratio in ("off_over", "auto_over"))
            table.add_row(str(row["users"]), name, f"{speed:.1f}", f"{row['ttft_seconds'][name]:.2f}", *ratios)
    Console().print(table)
    write_report({"dtype": dtype, "tokens": tokens, "rounds": rounds}, results, output, notes=notes)


class Bench:
    """All ways of this process, loaded once."""

    def __init__(self, tokens: int, most: int, dtype: str) -> None:
        from dflash.model import DFlashDraftModel
        from transformers import AutoModelForCausalLM

        llm = LLM("smollm2", "smollm2", max_batch_size=most, max_model_len=1024, dtype=dtype)
        assert isinstance(llm.engine, EmbeddedEngine)
        self.tokens, self.engine, self.plain = tokens, llm.engine, llm.engine.plain()
        for engine in (self.engine, self.plain):  # the others compute every prompt whole
            engine.scheduler.cache_manager.reuse = False
        embedding = self.engine.scheduler.target.embedding
        reference = AutoModelForCausalLM.from_pretrained(target_folder("smollm2"), dtype=embedding.dtype)
        self.reference = reference.to(embedding.device).eval()
        drafter = DFlashDraftModel.from_pretrained(drafter_source("smollm2"), dtype=embedding.dtype)
        self.drafter = drafter.to(embedding.device).eval()
        self.statistics = AcceptanceStatistics()
        self.ways: dict[str, Way] = {
            "HF": self.hugging_face,
            "z-lab": self.z_lab,
            "ours, off": lambda prompts: self.ours(self.plain, prompts),
            "ours, auto": lambda prompts: self.ours(self.engine, prompts),
        }

    def round(self, prompts: list[Ids], names: list[str]) -> dict[str, dict[str, Any]]:
        """Each way once, on the same prompts."""
        found = {}
        for name in names:
            start = perf_counter()
            timed = self.ways[name](prompts)
            speed = timed.tokens / (perf_counter() - start)
            assert timed.tokens == len(prompts) * self.tokens, f"{timed.tokens} tokens came"
            ttft = median(timed.first)
            found[name] = {"tokens_per_second": speed, "ttft_seconds": ttft, "answers": timed.answers}
        return found

    def ours(self, engine: EmbeddedEngine, prompts: list[Ids]) -> Timed:
        params = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        start = perf_counter()
        first: dict[int, float] = {}
        stream = engine.stream(prompts, [params] * len(prompts))
        for chunk in stream:
            if chunk.token_ids:
                first.setdefault(chunk.index, perf_counter() - start)
        answers = [output.token_ids for output in stream.outputs()]
        self.statistics = total(output.statistics for output in stream.outputs())
        return Timed(sum(map(len, answers)), list(first.values()), answers)

    @torch.inference_mode()
    def hugging_face(self, prompts: list[Ids]) -> Timed:
        longest, device = max(map(len, prompts)), self.reference.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        first, start = FirstToken(), perf_counter()
        length = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens}
        out = self.reference.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, stopping_criteria=[first], **length
        )[:, longest:]
        return Timed(out.numel(), [first.time - start] * len(prompts), out.tolist())

    @torch.inference_mode()
    def z_lab(self, prompts: list[Ids]) -> Timed:
        """One request after another; the time to first token includes the wait for those before."""
        from dflash.model import dflash_generate

        ends: list[float] = []  # of the target's passes: the first of a request gives its first token
        hook = self.reference.register_forward_hook(lambda *_: ends.append(perf_counter()))
        start, first, answers = perf_counter(), [], []
        for prompt in prompts:
            passes, ids = len(ends), torch.tensor([prompt], device=self.reference.device)
            out = dflash_generate(self.drafter, self.reference, ids, self.tokens, stop_token_ids=None)
            first.append(ends[passes] - start)
            answers.append(out[0, len(prompt) :].tolist())
        hook.remove()
        return Timed(sum(map(len, answers)), first, answers)


class FirstToken:
    """A stopping criterion for Hugging Face that never stops: it notes the time of the first token."""

    time: float = 0.0

    def __call__(self, ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self.time = self.time or perf_counter()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


class Server:
    """A way through a server's `/v1/completions`. Prompts are sent as text, which the server tokenises again."""

    def __init__(self, url: str, engine: EmbeddedEngine, tokens: int) -> None:
        self.url, self.tokenizer, self.tokens = url.rstrip("/") + "/v1", engine.tokenizer, tokens

    def __call__(self, prompts: list[Ids]) -> Timed:
        return asyncio.run(self._all([self.tokenizer.decode(prompt) for prompt in prompts]))

    async def _all(self, prompts: list[str]) -> Timed:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=self.url, api_key="none", timeout=3600, max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            found = await asyncio.gather(*(self._one(client, model, prompt) for prompt in prompts))
        return Timed(sum(tokens for tokens, _ in found), [first for _, first in found], [])

    async def _one(self, client: Any, model: str, prompt: str) -> tuple[int, float]:
        start, first, tokens = perf_counter(), None, 0
        stream = await client.completions.create(
            model=model, prompt=prompt, max_tokens=self.tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            if first is None and chunk.choices:
                first = perf_counter() - start
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        assert first is not None, "an answer without a chunk"
        return tokens, first


def summary(rounds: list[dict[str, dict[str, Any]]], names: list[str]) -> dict[str, Any]:
    """Medians, and our speed over each other way's: medians of the rounds' own ratios."""
    speeds = [{name: measured[name]["tokens_per_second"] for name in names} for measured in rounds]
    return {
        "tokens_per_second": {name: median(speed[name] for speed in speeds) for name in names},
        "ttft_seconds": {name: median(measured[name]["ttft_seconds"] for measured in rounds) for name in names},
        "all_rounds": {name: [speed[name] for speed in speeds] for name in names},
        "off_over": {name: median(speed["ours, off"] / speed[name] for speed in speeds) for name in names},
        "auto_over": {name: median(speed["ours, auto"] / speed[name] for speed in speeds) for name in names},
    }


if __name__ == "__main__":
    typer.run(main)

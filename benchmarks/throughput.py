"""Bursts of requests in process: no speculation, a fixed width of B and `width: auto`, a step of each in turn.

All requests of a burst start together and each makes exactly `tokens` tokens (greedy, the end of sequence ignored), so
every way does the same work. Prefill is included, prefix reuse is off. Run it with `benchmarks.steady --burst`.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.turns import in_turns
from dflash_serve import LLM, SamplingParams
from dflash_serve.backend import RequestOutput
from dflash_serve.speculation.statistics import total
from dflash_torch.engine import EmbeddedEngine
from tests.support.prompts import word_problems


class Bench:
    """One engine for each way, all on the same weights."""

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
        self.prompts = [full.tokenize(prompt) for prompt in word_problems(20)]

    def round(self, size: int, number: int) -> dict[str, dict[str, Any]]:
        """Each way once, on the same `size` prompts."""
        prompts = [self.prompts[n % len(self.prompts)] for n in range(size)]
        params = [SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)] * size
        streams = {way: engine.stream(prompts, params) for way, engine in self.engines.items()}
        turns = in_turns(streams, number)
        return {way: self._figures(stream.outputs(), turns[way].seconds) for way, stream in streams.items()}

    def _figures(self, outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
        assert all(len(output.token_ids) == self.tokens for output in outputs)
        statistics = total(output.statistics for output in outputs)
        return {
            "tokens_per_second": len(outputs) * self.tokens / seconds,
            "acceptance_length": statistics.acceptance_length,
            "tokens_per_step": statistics.tokens_per_step,
        }


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians of speeds, and of the rounds' own ratios."""
    speeds = [{way: figures["tokens_per_second"] for way, figures in measured.items()} for measured in rounds]
    ways = list(speeds[0])
    pairs = {"auto_over_better": {"off", "fixed"}, "auto_over_off": {"off"}}
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

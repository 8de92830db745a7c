"""Where one decoding step's time goes, by part, beside the least that this machine could need for it.

    python -m benchmarks.step_profile [--streams 1,8,32] [--dtype float32] [--output FILE]

Floors: the bytes of weights and K/V that a step must read, over the bandwidth at which this machine reads memory
beyond its caches; and its multiplications, over the rate of a large matrix product. A step cannot be faster than the
larger of both. Each part runs by itself on a step's own shapes and weights; `host` is what a step of the engine
takes beyond its parts. `target, plain` is the target's pass with PyTorch's own small operators, attention included;
`of blocks` is attention where every request verifies a block of 8 rows.
Repetitions are interleaved; a part's time is the least of them, the median stands beside it. On a busy machine take one
thread (`OMP_NUM_THREADS=1`): then its own CPU time counts, which others' work changes little.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.decoding import measured_on, write_report
from dflash_serve import LLM, SamplingParams
from dflash_serve.common.provenance import versions
from dflash_serve.models.attention import RaggedAttention, ragged_attention
from dflash_serve.models.compiled.operators import CompiledAttention
from dflash_serve.models.kv_cache import Span, span_positions
from dflash_serve.models.layers import CompiledLinear, PlainOperators, rotate
from dflash_serve.models.target import TargetModel
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.model_runner import TargetRunner
from dflash_torch.sampler import Sampler

BIG = 64 * 2**20
"""Numbers of the tensor that bandwidth is measured with: 256 MiB in float32."""
MATRIX = 1024
BLOCK = 8
"""Rows of a request in a step that verifies."""
Work = Callable[[], object]


def main(
    streams: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,8,32",
    context: Annotated[int, typer.Option(help="Tokens before the step.")] = 160,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    repetitions: Annotated[int, typer.Option(help="Interleaved; the least counts.")] = 15,
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = "smollm2",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure the machine, then a step at each number of streams."""
    sizes = [int(size) for size in streams.split(",")]
    llm = LLM(target, None, dtype=dtype, max_batch_size=max(sizes), max_model_len=context + 64 + 4 * repetitions)
    assert isinstance(llm.engine, EmbeddedEngine)
    with torch.inference_mode():
        machine = floors(llm.engine.scheduler.target.embedding.dtype, repetitions)
        results = [Profile(llm.engine, size, context).measure(repetitions, machine) for size in sizes]
    report = {
        "environment": measured_on(),
        "versions": versions("torch", "dflash-serve"),
        "load": {"target": target, "dtype": dtype, "context": context, "repetitions": repetitions},
        "operators": llm.engine.scheduler.target.operators.name,
        "machine": machine,
        "steps": results,
    }
    show(report)
    write_report(report, output)


def interleaved(jobs: dict[str, Work], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each job in turns, sorted; the first round is not counted."""
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repetitions + 1):
        for name, work in jobs.items():
            start = clock()
            work()
            times[name].append(clock() - start)
    return {name: sorted(seconds[1:]) for name, seconds in times.items()}


def floors(dtype: torch.dtype, repetitions: int) -> dict[str, float]:
    """GB/s of reading memory, and Gflop/s of a large product in each dtype."""
    big, square = torch.ones(BIG), torch.randn(MATRIX, MATRIX)
    half = square.bfloat16()
    times = interleaved(
        {
            "read": big.sum,
            "float32": lambda: square @ square,
            "bfloat16": lambda: half @ half,
        },
        repetitions,
    )
    products = {name: 2e-9 * MATRIX**3 / times[name][0] for name in ("float32", "bfloat16")}
    return {
        "read_gb_per_second": 4e-9 * BIG / times["read"][0],
        **{f"{name}_gflop_per_second": rate for name, rate in products.items()},
        "gflop_per_second": products[str(dtype).removeprefix("torch.")],
    }


class Profile:
    """A step of `size` requests with `context` tokens each, whole and in parts."""

    def __init__(self, engine: EmbeddedEngine, size: int, context: int) -> None:
        self.engine, self.size, self.context = engine, size, context
        self.target: TargetModel = engine.scheduler.target
        self.spans = [Span(entry, context, 1) for entry in range(size)]
        self.token_ids = [[1]] * size
        self.cache = self.target.new_cache(size, context + BLOCK)
        self.cache.keys.normal_()
        self.cache.values.normal_()
        self.runner = TargetRunner(self.target, self.cache, 1)

    def measure(self, repetitions: int, machine: dict[str, float]) -> dict[str, Any]:
        """Milliseconds of each part, and each floor of the whole."""
        prompts = [[1 + n % 7] * self.context for n in range(self.size)]
        params = SamplingParams(temperature=0, max_tokens=3 * repetitions + 40, ignore_eos=True)
        stream = self.engine.stream(prompts, [params] * self.size)
        self.engine.step()
        while not all(request.is_decoding for request in self.engine.scheduler.running):
            self.engine.step()
        times = interleaved({"step": self.engine.step, **self.parts()}, repetitions)
        stream.close()
        least = {name: 1e3 * seconds[0] for name, seconds in times.items()}
        least["host"] = least["step"] - least["target"] - least["head"] - least["sampling"]
        return {
            "streams": self.size,
            "milliseconds": least,
            "medians": {name: 1e3 * median(seconds) for name, seconds in times.items()},
            "floors": self.floors(machine),
        }

    def parts(self) -> dict[str, Work]:
        """What a step is made of: the target's pass and its own parts, the head, sampling."""
        target, config, rows = self.target, self.target.config, self.size
        x = torch.randn(rows, config.hidden_size, dtype=target.embedding.dtype)
        inner = torch.randn(rows, config.intermediate_size, dtype=x.dtype)
        heads = torch.randn(rows, config.num_attention_heads * config.head_dim, dtype=x.dtype)
        logits, requests = target.logits(x), list(self.engine.scheduler.running)

        def linear() -> None:
            for layer in target.layers:
                layer.qkv(x), layer.o(heads), layer.gate_up(x), layer.down(inner)

        return {
            "target": lambda: self.runner(self.token_ids, self.spans, ()),
            "target, plain": self.plain_pass,
            "linear layers": linear,
            "attention": self.attention(1),
            "of blocks": self.attention(BLOCK),
            "of blocks, plain": self.attention(BLOCK, plain=True),
            "norms and SwiGLU": self.small(x, target.layers[0].gate_up(x)),
            "head": lambda: target.logits(x),
            "sampling": lambda: Sampler()(requests, [[]] * rows, logits, config.eos_token_ids),
        }

    def plain_pass(self) -> None:
        """The target's pass without compiled operators."""
        self.target.operators, kept = PlainOperators(), self.target.operators
        self.runner(self.token_ids, self.spans, ())
        self.target.operators = kept

    def attention(self, width: int, *, plain: bool = False) -> Work:
        """Rotation, K/V writes and attention of all layers, `width` rows of each request; plain = PyTorch's own."""
        target, config = self.target, self.target.config
        spans = [Span(entry, self.context, width) for entry in range(self.size)]
        qkv = target.layers[0].qkv(torch.randn(self.size * width, config.hidden_size, dtype=target.embedding.dtype))

        def run() -> None:
            cos, sin = target.rotary(span_positions(spans))
            if plain:
                attend: object = ragged_attention(self.cache, spans, config.layers, config.num_attention_heads)
            else:
                attend = target.attention(self.cache, spans)
            if isinstance(attend, CompiledAttention):
                for layer in target.layers:
                    attend.rotated(layer.index, qkv, cos, sin, layer.qk_norm)
                return
            assert isinstance(attend, RaggedAttention)
            counts = [config.num_attention_heads + config.num_key_value_heads, config.num_key_value_heads]
            for layer in target.layers:
                turned, v = qkv.view(len(qkv), -1, config.head_dim).split(counts, dim=1)
                q, k = rotate(turned, cos, sin).split(layer.heads[:2], dim=1)
                attend(layer.index, q, k, v)

        return run

    def small(self, x: Tensor, gate_up: Tensor) -> Work:
        """Both norms and SwiGLU's product of all layers."""
        target, operators = self.target, self.target.operators

        def run() -> None:
            for layer in target.layers:
                operators.add_norm(x, x, layer.input_norm)
                operators.add_norm(x, x, layer.post_attention_norm)
                operators.silu_product(gate_up)

        return run

    def floors(self, machine: dict[str, float]) -> dict[str, float]:
        """Milliseconds that reading alone, and multiplying alone, would take."""
        target, config = self.target, self.target.config
        attended = config.num_attention_heads * config.head_dim
        kept = 2 * config.num_key_value_heads * config.head_dim * target.embedding.element_size()
        layers = [part for layer in target.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        stored = [packed_weight(layer) for layer in (*layers, target.head)]
        weights, cached = sum(weight.numel() for weight in stored), self.size * self.context * config.num_layers
        products = 2 * self.size * weights + 4 * cached * attended
        read = sum(weight.nbytes for weight in stored) + cached * kept
        return {
            "reading": 1e-6 * read / machine["read_gb_per_second"],
            "multiplying": 1e-6 * products / machine["gflop_per_second"],
        }


def packed_weight(linear: nn.Module) -> Tensor:
    """A layer's weights as they lie in memory."""
    return linear.packed if isinstance(linear, CompiledLinear) else linear.weight  # type: ignore[return-value]


def show(report: dict[str, Any]) -> None:
    """A row a number of streams: milliseconds, and the step's floor as a share of it."""
    machine, steps = report["machine"], report["steps"]
    names = list(steps[0]["milliseconds"])
    title = f"ms of a step, {report['load']['target']}, {report['load']['dtype']}, {report['operators']} operators"
    table = Table("streams", *names, "reading floor", "multiplying floor", "floor / step", title=title)
    for step in steps:
        figures, least = step["milliseconds"], step["floors"]
        share = max(least.values()) / figures["step"]
        row = [f"{value:.1f}" for value in (*figures.values(), *least.values())]
        table.add_row(str(step["streams"]), *row, f"{share:.2f}")
    Console().print(table)
    rates = f"{machine['float32_gflop_per_second']:.0f} Gflop/s in float32, {machine['bfloat16_gflop_per_second']:.0f}"
    Console().print(f"this machine reads {machine['read_gb_per_second']:.1f} GB/s and multiplies {rates} in bfloat16")


if __name__ == "__main__":
    typer.run(main)

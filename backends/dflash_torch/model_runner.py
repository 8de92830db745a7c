"""The passes of target and drafter: ragged on a CPU; on a GPU, decoding steps are padded to few shapes and captured.

A decoding step is some hundred small kernels. Launched one by one they keep a GPU waiting for its host; captured once
in a CUDA graph and replayed, they are launched together. A graph has fixed shapes, so steps are padded to a few.
The capture itself was not run on a GPU yet; on a CPU the same work runs uncaptured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_serve.models.attention.padded import PaddedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.target import TargetModel, TargetOutput

SHORTEST = 256
"""Keys read at least; lengths double from here."""
LONGEST = 4096
"""Keys read at most: beyond, reading what is only padding would cost more than launching kernels one by one."""
WARM_UP = 2
"""Calls before a capture: libraries set themselves up in the first, which must not be recorded."""

Work = Callable[..., tuple[Tensor, ...]]


class Shape(NamedTuple):
    """N requests of W rows each, which attend over the first `length` positions of their cache entries."""

    requests: int
    width: int
    length: int


class StaticPass:
    """A function of tensors of fixed shapes: captured in a CUDA graph at its first call, or just called on a CPU.

    What it returns is overwritten by the next call.

    Args:
        work: reads the inputs it is called with, and tensors that stay where they are.
        inputs: examples; only their shapes, dtypes and device matter.
    """

    def __init__(self, work: Work, inputs: Sequence[Tensor]) -> None:
        self.work = work
        self.inputs = [torch.empty_like(tensor) for tensor in inputs]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given)
        if self.inputs[0].device.type != "cuda":
            return self.work(*self.inputs)
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        return self.outputs

    def _capture(self) -> None:
        """CUDA's rule: warm up on a stream of its own, then record what the work launches."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.work(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.work(*self.inputs)


class TargetRunner:
    """The target over ragged batches.

    Args:
        widest: most rows of a request in a decoding step, B.
        static: pad and capture decoding steps; None = on a GPU.
    """

    def __init__(self, target: TargetModel, cache: KVCache, widest: int, *, static: bool | None = None) -> None:
        self.target, self.cache, self.widest = target, cache, widest
        self.static = _prepared(cache, static)
        self.captured: dict[tuple[Shape, tuple[int, ...]], StaticPass] = {}

    def __call__(self, rows: Sequence[list[int]], spans: Sequence[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        """Token ids of each span's rows -> hidden [rows, H] and features [rows, F*H]; K/V goes into the cache."""
        shape = _shape(self.cache, spans, self.widest) if self.static else None
        if shape is None:
            token_ids = torch.tensor([token for row in rows for token in row], device=self.target.device)
            return self._run(token_ids, spans, layer_ids)
        table = torch.tensor(padded_table(spans, rows, shape)).to(self.target.device, non_blocking=True)
        key = (shape, layer_ids)
        if key not in self.captured:
            self.captured[key] = StaticPass(lambda table: self._work(table, shape, layer_ids), [table])
        hidden, *features = self.captured[key](table)
        kept = real_rows(spans, shape)
        return TargetOutput(_rows(hidden, kept), _rows(features[0], kept) if features else None)

    def _run(self, token_ids: Tensor, spans: Sequence[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        attend = self.target.attention(self.cache, spans)
        output: TargetOutput = self.target(token_ids, span_positions(spans, self.target.device), attend, layer_ids)
        return output

    def _work(self, table: Tensor, shape: Shape, layer_ids: tuple[int, ...]) -> tuple[Tensor, ...]:
        config = self.target.config
        positions = _positions(table, shape)
        attend = PaddedAttention(
            self.cache, table[:, 0], positions, shape.length, config.layers, config.num_attention_heads
        )
        output = self.target(table[:, 2:].reshape(-1), positions.reshape(-1), attend, layer_ids)
        return (output.hidden,) if output.features is None else (output.hidden, output.features)


class DrafterRunner:
    """A drafter over blocks [anchor, mask, ...] of any number of requests; `DrafterConfig.rows` says how many rows.

    Args:
        embedding: the target's [vocabulary, H].
        cache: the drafter's context K/V.
        static: as for the target.
    """

    def __init__(self, embedding: Tensor, cache: KVCache, block_size: int, *, static: bool | None = None) -> None:
        self.embedding, self.cache, self.block_size = embedding, cache, block_size
        self.static = _prepared(cache, static)
        self.captured: dict[tuple[Drafter, Shape], StaticPass] = {}

    def __call__(self, drafter: Drafter, anchors: list[int], starts: Sequence[tuple[int, int]]) -> Tensor:
        """Anchors, and (cache entry, position) of each -> hidden [requests * rows, H]; their K/V goes behind it."""
        size = drafter.rows(self.block_size)
        spans = [Span(entry, start, size) for entry, start in starts]
        shape = _shape(self.cache, spans, size) if self.static else None
        if shape is None:
            return self._run(drafter, torch.tensor(anchors, device=self.embedding.device), spans)
        table = torch.tensor(padded_table(spans, [[anchor] for anchor in anchors], shape)).to(self.embedding.device)
        key = (drafter, shape)
        if key not in self.captured:
            self.captured[key] = StaticPass(lambda table: self._work(drafter, table, shape), [table])
        return _rows(self.captured[key](table)[0], real_rows(spans, shape))

    def _run(self, drafter: Drafter, anchors: Tensor, spans: Sequence[Span]) -> Tensor:
        noise, attend = drafter.noise(anchors, self.embedding, self.block_size), drafter.attention(self.cache, spans)
        hidden: Tensor = drafter(noise, span_positions(spans, noise.device), attend, block_size=self.block_size)
        return hidden

    def _work(self, drafter: Drafter, table: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        config, positions = drafter.config, _positions(table, shape)
        noise = drafter.noise(table[:, 2], self.embedding, self.block_size)
        attend = PaddedAttention(
            self.cache, table[:, 0], positions, shape.length, config.layers, config.num_attention_heads
        )
        return (drafter(noise, positions.reshape(-1), attend, block_size=self.block_size),)


def _prepared(cache: KVCache, static: bool | None) -> bool:
    """Whether passes are static; a K/V cache that will be read beyond what was written must hold numbers, not NaN."""
    static = cache.keys.device.type == "cuda" if static is None else static
    if static:
        cache.keys.zero_()
        cache.values.zero_()
    return static


def _shape(cache: KVCache, spans: Sequence[Span], widest: int) -> Shape | None:
    return shape_of(spans, max_batch_size=cache.entries, widest=widest, capacity=cache.capacity)


def _positions(table: Tensor, shape: Shape) -> Tensor:
    """[N, W] from the table's starts."""
    return table[:, 1:2] + torch.arange(shape.width, device=table.device)


def _rows(tensor: Tensor, kept: list[int] | None) -> Tensor:
    return tensor if kept is None else tensor[kept]


def shape_of(spans: Sequence[Span], *, max_batch_size: int, widest: int, capacity: int) -> Shape | None:
    """The smallest shape that holds these spans; None where none does (a prefill, a context too long or too full).

    Args:
        max_batch_size: most requests of a step.
        widest: most rows of a request in a decoding step, B.
        capacity: positions of a cache entry.
    """
    rows = max(span.length for span in spans)
    if rows > widest:
        return None
    width = _at_least(rows, 1, widest)
    end = max(span.start for span in spans) + width
    if end > min(capacity, LONGEST):
        return None
    return Shape(_at_least(len(spans), 1, max_batch_size), width, _at_least(end, SHORTEST, capacity))


def padded_table(spans: Sequence[Span], rows: Sequence[Sequence[int]], shape: Shape) -> list[list[int]]:
    """[entry, start, numbers...] for each of N requests; the last one is repeated: it writes the same K/V again.

    Args:
        rows: numbers of each span, as many as it has rows or fewer than W; filled up with 0.
    """
    table = [
        [span.entry, span.start, *numbers, *[0] * (shape.width - len(numbers))]
        for span, numbers in zip(spans, rows, strict=True)
    ]
    return table + [table[-1]] * (shape.requests - len(table))


def real_rows(spans: Sequence[Span], shape: Shape) -> list[int] | None:
    """Which of the N x W rows are the spans' own; None = all of them, in order."""
    if len(spans) == shape.requests and all(span.length == shape.width for span in spans):
        return None
    return [n * shape.width + row for n, span in enumerate(spans) for row in range(span.length)]


def _at_least(number: int, first: int, last: int) -> int:
    """The first of first, 2 first, 4 first, ..., last that is not below `number`."""
    size = first
    while size < number:
        size *= 2
    return min(size, last)

"""Passes of target and drafter: ragged on a CPU; on a GPU decoding steps are padded to a few shapes and captured.

A decoding step has some hundred small kernels. Launched one by one they keep a GPU waiting for its host; a CUDA graph
launches them together. A graph has fixed shapes, so steps are padded to a few shapes. Requests that fit a captured
shape use its graph; the others, such as prompts, run in one ragged pass. On a CPU the same work runs without graphs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.target import TargetConfig
from dflash_serve.errors import first_line
from dflash_serve.models.attention import PaddedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.target import TargetModel, TargetOutput

log = logging.getLogger(__name__)
Work = Callable[..., tuple[Tensor, ...]]
# Keys that the shortest shape reads; lengths double from here.
SHORTEST = 256
# Keys that the longest shape reads: in longer ones, reading padding would cost more than launching kernels one by one.
LONGEST = 4096


class Shape(NamedTuple):
    """N requests of W rows each, which attend to the first `length` positions of their cache entries."""

    requests: int
    width: int
    length: int

    @property
    def spans(self) -> list[Span]:
        """Spans that need this shape."""
        return [Span(entry, self.length - self.width, self.width) for entry in range(self.requests)]


def shapes(*, max_batch_size: int, widest: int, capacity: int) -> list[Shape]:
    """All shapes that `shape_of` can return, from small to large."""
    return [
        Shape(requests, width, length)
        for length in sizes(SHORTEST, min(capacity, LONGEST))
        for requests in sizes(1, max_batch_size)
        for width in sizes(1, widest)
    ]


def shape_of(spans: Sequence[Span], *, max_batch_size: int, widest: int, capacity: int) -> Shape | None:
    """The smallest shape that holds these spans; None where none does (a prefill, or a long context).

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
    """[entry, start, numbers...] for each of N requests. The last row is repeated: it writes the same K/V again.

    Args:
        rows: numbers of each span, at most W of them; filled up with 0.
    """
    table = [
        [span.entry, span.start, *numbers, *[0] * (shape.width - len(numbers))]
        for span, numbers in zip(spans, rows, strict=True)
    ]
    return table + [table[-1]] * (shape.requests - len(table))


def real_rows(spans: Sequence[Span], shape: Shape) -> slice | list[int]:
    """The rows of the N x W that belong to the spans; the others are padding."""
    if all(span.length == shape.width for span in spans):
        return slice(len(spans) * shape.width)
    return [n * shape.width + row for n, span in enumerate(spans) for row in range(span.length)]


@cache
def sizes(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ..., last."""
    found = [min(first, last)]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return tuple(found)


def _at_least(number: int, first: int, last: int) -> int:
    return next(size for size in sizes(first, last) if size >= number)


class StaticPass:
    """A function of tensors of fixed shapes, captured in a CUDA graph at its first call. On a CPU it is just called.

    The next call overwrites the returned tensors. On a GPU without memory for a graph the function is called, slowly.

    Args:
        work: reads the inputs it is called with, and tensors that stay where they are.
        inputs: examples of their shapes, dtypes and device.
    """

    def __init__(self, work: Work, inputs: Sequence[Tensor]) -> None:
        self.work = work
        self.inputs = [torch.empty_like(tensor) for tensor in inputs]
        self.captures = self.inputs[0].device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given)
        if self.captures and self.graph is None:
            try:
                self._capture()
            except torch.OutOfMemoryError as error:
                self.captures = False
                log.warning("no memory for a CUDA graph, its kernels are launched one by one: %s", first_line(error))
        if self.graph is None:
            return self.work(*self.inputs)
        self.graph.replay()
        return self.outputs

    def _capture(self) -> None:
        """Runs the work once on another stream, so that libraries initialise themselves, then records its kernels.

        `torch.cuda.graph` is not used: it collects garbage and empties the allocator's cache before every capture.
        """
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _no_garbage_collected():
            self.work(*self.inputs)
            torch.cuda.synchronize()
            graph.capture_begin(pool=_pool())
            try:
                self.outputs = self.work(*self.inputs)
            except BaseException:
                with suppress(RuntimeError):  # it says that the capture is broken
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph


@cache
def _pool() -> Any:  # shared: no two graphs run at once, and their outputs lie apart
    return torch.cuda.graph_pool_handle()


@contextmanager
def _no_garbage_collected() -> Iterator[None]:  # a graph that is destroyed while another is captured spoils it
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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

    def prepare(self, layer_ids: tuple[int, ...]) -> None:
        """Captures all decoding passes with features of these layers, and those of width 1 without. Nothing may run."""
        for shape in _shapes(self.cache, self.widest):
            for features in {layer_ids, ()} if shape.width == 1 else {layer_ids}:
                self([[0] * shape.width] * shape.requests, shape.spans, features)

    def __call__(self, rows: Sequence[list[int]], spans: Sequence[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        """Token ids of each span's rows -> hidden [rows, H] and features [rows, F*H]; K/V goes into the cache."""
        shape = _shape(self.cache, spans, self.widest) if self.static else None
        if shape is None:
            fits = [self.static and _shape(self.cache, [span], self.widest) is not None for span in spans]
            mixed = any(fits) and not all(fits)
            return self._in_two(rows, spans, layer_ids, fits) if mixed else self._run(rows, spans, layer_ids)
        table = torch.tensor(padded_table(spans, rows, shape)).to(self.target.device, non_blocking=True)
        key = (shape, layer_ids)
        if key not in self.captured:
            self.captured[key] = StaticPass(lambda table: self._work(table, shape, layer_ids), [table])
        hidden, *features = self.captured[key](table)
        kept = real_rows(spans, shape)
        return TargetOutput(hidden[kept], features[0][kept] if features else None)

    def _in_two(
        self, rows: Sequence[list[int]], spans: Sequence[Span], layer_ids: tuple[int, ...], fits: Sequence[bool]
    ) -> TargetOutput:
        hidden: dict[int, Tensor] = {}
        features: dict[int, Tensor] = {}
        for kind in (True, False):
            chosen = [n for n, fit in enumerate(fits) if fit is kind]
            part = self([rows[n] for n in chosen], [spans[n] for n in chosen], layer_ids)
            lengths = [spans[n].length for n in chosen]
            hidden.update(zip(chosen, part.hidden.split(lengths), strict=True))
            if part.features is not None:
                features.update(zip(chosen, part.features.split(lengths), strict=True))
        return TargetOutput(_in_order(hidden), _in_order(features) if features else None)

    def _run(self, rows: Sequence[list[int]], spans: Sequence[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        token_ids = torch.tensor([token for row in rows for token in row], device=self.target.device)
        attend = self.target.attention(self.cache, spans)
        output: TargetOutput = self.target(token_ids, span_positions(spans, self.target.device), attend, layer_ids)
        return output

    def _work(self, table: Tensor, shape: Shape, layer_ids: tuple[int, ...]) -> tuple[Tensor, ...]:
        positions, attend = _padded(self.cache, table, shape, self.target.config)
        output = self.target(table[:, 2:].reshape(-1), positions.reshape(-1), attend, layer_ids)
        return (output.hidden,) if output.features is None else (output.hidden, output.features)


class DrafterRunner:
    """Runs a drafter over blocks [anchor, mask, ...] of any number of requests; `DrafterConfig.rows` is their size.

    Args:
        embedding: the target's [vocabulary, H].
        cache: the drafter's context K/V.
        static: as in `TargetRunner`.
    """

    def __init__(self, embedding: Tensor, cache: KVCache, block_size: int, *, static: bool | None = None) -> None:
        self.embedding, self.cache, self.block_size = embedding, cache, block_size
        self.static = _prepared(cache, static)
        self.captured: dict[tuple[Drafter, Shape], StaticPass] = {}

    def prepare(self, drafter: Drafter) -> None:
        """Captures every pass; no request may run."""
        size = drafter.config.rows(self.block_size)
        for shape in _shapes(self.cache, size):
            if shape.width == size:
                self(drafter, [0] * shape.requests, [(span.entry, span.start) for span in shape.spans])

    def __call__(self, drafter: Drafter, anchors: list[int], starts: Sequence[tuple[int, int]]) -> Tensor:
        """Anchors, and (cache entry, position) of each -> hidden [requests * rows, H]; K/V is written there."""
        size = drafter.config.rows(self.block_size)
        spans = [Span(entry, start, size) for entry, start in starts]
        shape = _shape(self.cache, spans, size) if self.static else None
        if shape is None:
            return self._run(drafter, torch.tensor(anchors, device=self.embedding.device), spans)
        table = torch.tensor(padded_table(spans, [[anchor] for anchor in anchors], shape)).to(self.embedding.device)
        key = (drafter, shape)
        if key not in self.captured:
            self.captured[key] = StaticPass(lambda table: self._work(drafter, table, shape), [table])
        hidden: Tensor = self.captured[key](table)[0][real_rows(spans, shape)]
        return hidden

    def _run(self, drafter: Drafter, anchors: Tensor, spans: Sequence[Span]) -> Tensor:
        noise, attend = drafter.noise(anchors, self.embedding, self.block_size), drafter.attention(self.cache, spans)
        hidden: Tensor = drafter(noise, span_positions(spans, noise.device), attend, block_size=self.block_size)
        return hidden

    def _work(self, drafter: Drafter, table: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        positions, attend = _padded(self.cache, table, shape, drafter.config)
        noise = drafter.noise(table[:, 2], self.embedding, self.block_size)
        return (drafter(noise, positions.reshape(-1), attend, block_size=self.block_size),)


def _prepared(cache: KVCache, static: bool | None) -> bool:
    """True = static passes. These read beyond the written part of a K/V cache, which must not hold NaN."""
    static = cache.keys.device.type == "cuda" if static is None else static
    if static:
        cache.keys.zero_()
        cache.values.zero_()
    return static


def _shape(cache: KVCache, spans: Sequence[Span], widest: int) -> Shape | None:
    return shape_of(spans, max_batch_size=cache.entries, widest=widest, capacity=cache.capacity)


def _shapes(cache: KVCache, widest: int) -> list[Shape]:  # the largest first: the smaller ones reuse its memory
    return shapes(max_batch_size=cache.entries, widest=widest, capacity=cache.capacity)[::-1]


def _in_order(rows: dict[int, Tensor]) -> Tensor:
    return torch.cat([rows[n] for n in sorted(rows)])


def _padded(
    cache: KVCache, table: Tensor, shape: Shape, config: TargetConfig | DrafterConfig
) -> tuple[Tensor, PaddedAttention]:  # positions [N, W] from the table's starts, and the attention over them
    positions = table[:, 1:2] + torch.arange(shape.width, device=table.device)
    heads = config.num_attention_heads
    return positions, PaddedAttention(cache, table[:, 0], positions, shape.length, config.layers, heads)

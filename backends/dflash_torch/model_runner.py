"""Passes of target and drafter: ragged on a CPU; on a GPU decoding steps are padded to a few shapes and captured.

A decoding step has some hundred small kernels. Launched one by one they keep a GPU waiting for its host; a CUDA graph
launches them together. A graph has fixed shapes, so steps are padded to a few shapes. Requests that fit a captured
shape use its graph; the others, such as prompts, run in one ragged pass. On a CPU the same work runs without graphs.

The graphs of an engine share a memory pool. A replay may overwrite what any other graph of the pool has returned, so
results are read before another graph runs. State that must last is a tensor outside the pool, which a graph writes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_serve.errors import first_line
from dflash_serve.models.attention import PaddedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions, to_device
from dflash_serve.models.target import TargetModel, TargetOutput

log = logging.getLogger(__name__)
Work = Callable[..., tuple[Tensor, ...]]
# Keys that the shortest shape reads; lengths double from here, up to the capacity of a cache entry.
SHORTEST = 256
# A padded pass gathers K/V of its entries (one read, one write), then attends over them (one more read).
READS_OF_PADDING = 3


class Shape(NamedTuple):
    """N requests of W rows each, which attend to the first `length` positions of their cache entries."""

    requests: int
    width: int
    length: int

    @property
    def spans(self) -> list[Span]:
        """Spans that need this shape."""
        return [Span(entry, self.length - self.width, self.width) for entry in range(self.requests)]

    def table(self, spans: Sequence[Span], rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """[entry, start, numbers...] for each of N requests. The last row is repeated: it writes the same K/V again.

        Args:
            rows: numbers of each span, at most W of them; filled up with 0.
        """
        table = [
            [span.entry, span.start, *numbers, *[0] * (self.width - len(numbers))]
            for span, numbers in zip(spans, rows, strict=True)
        ]
        return table + [table[-1]] * (self.requests - len(table))

    def real_rows(self, spans: Sequence[Span]) -> slice | list[int]:
        """The rows of the N x W that belong to the spans; the others are padding."""
        if all(span.length == self.width for span in spans):
            return slice(len(spans) * self.width)
        return [n * self.width + row for n, span in enumerate(spans) for row in range(span.length)]


class Shapes(NamedTuple):
    """The few shapes that decoding steps are padded to."""

    max_batch_size: int  # most requests of a step
    widest: int  # most rows of a request in a decoding step, B
    capacity: int  # positions of a cache entry
    pass_keys: float = inf  # padded keys whose reading takes as long as one more pass over the model's weights

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys that passes read: SHORTEST, twice that, ..., capacity. The last step is SHORTEST or more."""
        *shorter, last = sizes(SHORTEST, self.capacity)
        return (*shorter[: len(shorter) - (last - SHORTEST < shorter[-1])], last) if shorter else (last,)

    def all(self, widths: Collection[int] | None = None) -> list[Shape]:
        """All shapes that `fit` can return, the largest first: the smaller ones reuse its memory.

        Args:
            widths: only shapes of these; None = of every width.
        """
        return [
            Shape(requests, width, length)
            for length in self.lengths[::-1]
            for requests in sizes(1, self.max_batch_size)[::-1]
            for width in sizes(1, self.widest)[::-1]
            if widths is None or width in widths
        ]

    def fit(self, spans: Sequence[Span]) -> Shape | None:
        """The smallest shape that holds these spans; None where none does, as of a prefill."""
        rows = max(span.length for span in spans)
        if rows > self.widest:
            return None
        width = at_least(rows, 1, self.widest)
        end = max(span.start for span in spans) + width
        if end > self.capacity:
            return None
        return Shape(at_least(len(spans), 1, self.max_batch_size), width, self._length(end))

    def parts(self, spans: Sequence[Span]) -> list[list[int]]:
        """Places of the spans that run in one pass each: one or two padded ones, and one of those that fit no shape.

        Short contexts are padded to the longest of their pass. They run in a pass of their own where that reads less,
        although it reads the weights once more.
        """
        if self.fit(spans):
            return self._by_length(list(range(len(spans))), spans)
        fits = [self.fit([span]) is not None for span in spans]
        padded, others = ([n for n, fit in enumerate(fits) if fit is kind] for kind in (True, False))
        return [*(self._by_length(padded, spans) if padded else []), *([others] if others else [])]

    def _by_length(self, places: list[int], spans: Sequence[Span]) -> list[list[int]]:
        width = at_least(max(spans[n].length for n in places), 1, self.widest)
        ends = {n: spans[n].start + width for n in places}
        longest = self._length(min(max(ends.values()), self.capacity))
        fewest: float = self._keys(len(places), longest)
        found = [places]
        if fewest <= self.pass_keys:
            return found
        for length in self.lengths:
            short = [n for n in places if ends[n] <= length]
            if not short or len(short) == len(places):
                continue
            long = len(places) - len(short)
            keys = self.pass_keys + self._keys(len(short), length) + self._keys(long, longest)
            if keys < fewest:
                fewest, found = keys, [short, [n for n in places if ends[n] > length]]
        return found

    def _keys(self, requests: int, length: int) -> int:  # that a padded pass reads
        return at_least(requests, 1, self.max_batch_size) * length

    def _length(self, end: int) -> int:
        return next(length for length in self.lengths if length >= end)


@cache
def sizes(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ..., last."""
    found = [min(first, last)]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return tuple(found)


def at_least(number: int, first: int, last: int) -> int:
    """The smallest of the sizes that is not smaller than the number."""
    return next(size for size in sizes(first, last) if size >= number)


class GraphPool:
    """Memory of the CUDA graphs of one engine."""

    @cached_property
    def handle(self) -> Any:
        return torch.cuda.graph_pool_handle()


class StaticPass:
    """A function of tensors of fixed shapes, captured in a CUDA graph at its first call. On a CPU it is just called.

    The next call, or one of another pass of the pool, overwrites the returned tensors. On a GPU without memory for a
    graph the function is called, slowly.

    Args:
        work: reads the inputs it is called with, and tensors that stay where they are.
        inputs: examples of their shapes, dtypes and device.
        changes: tensors outside the pool that `work` reads and then changes, or whose old values must not be lost.
    """

    def __init__(self, work: Work, inputs: Sequence[Tensor], pool: GraphPool, changes: Sequence[Tensor] = ()) -> None:
        self.work, self.pool, self.changes = work, pool, changes
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
        before = [tensor.clone() for tensor in self.changes]
        graph, stream, current = torch.cuda.CUDAGraph(), _capture_stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), _no_garbage_collected():
                self.work(*self.inputs)
                torch.cuda.synchronize()
                graph.capture_begin(pool=self.pool.handle)
                try:
                    self.outputs = self.work(*self.inputs)
                except BaseException:
                    with suppress(RuntimeError):  # it says that the capture is broken
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            current.wait_stream(stream)
            for tensor, kept in zip(self.changes, before, strict=True):
                tensor.copy_(kept)
        self.graph = graph


@cache
def _capture_stream() -> Any:
    # One for all graphs: the allocator reuses memory, and cuBLAS its workspace, on the same stream only.
    return torch.cuda.Stream()


@contextmanager
def _no_garbage_collected() -> Iterator[None]:  # a graph that is destroyed while another is captured spoils it
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Fetched:
    """A tensor on its way to the host. The copy does not stop the device; `tolist` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.host, self.arrived = tensor, None
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def tolist(self) -> Any:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host.tolist()


class Runner:
    """Passes of one model over the requests of a K/V cache: captured where a shape fits, ragged where none does.

    Args:
        static: pad and capture decoding steps; None = on a GPU.
        pool: memory of the engine's graphs; None = a pool of its own.
    """

    def __init__(self, cache: KVCache, *, static: bool | None = None, pool: GraphPool | None = None) -> None:
        self.cache, self.pool = cache, pool or GraphPool()
        self.static = cache.keys.device.type == "cuda" if static is None else static
        if self.static:  # static passes read beyond the written part of a K/V cache, which must not hold NaN
            cache.keys.zero_()
            cache.values.zero_()
        self.captured: dict[tuple[Shape, object], StaticPass] = {}

    def _shapes(self, widest: int) -> Shapes:
        return Shapes(self.cache.entries, widest, self.cache.capacity)

    def run(
        self, shape: Shape, kind: object, work: Work, *inputs: Tensor, changes: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """The outputs of `work`, which is captured for each shape and kind; the next call overwrites them."""
        if (shape, kind) not in self.captured:
            self.captured[shape, kind] = StaticPass(work, inputs, self.pool, changes)
        return self.captured[shape, kind](*inputs)

    def _padded(
        self, table: Tensor, shape: Shape, model: TargetModel | Drafter
    ) -> tuple[Tensor, PaddedAttention]:  # positions [N, W] from the table's starts, and the attention over them
        positions = table[:, 1:2] + torch.arange(shape.width, device=table.device)
        attention, config = model.operators.padded, model.config
        heads = config.num_attention_heads
        return positions, attention(self.cache, table[:, 0], positions, shape.length, config.layers, heads)


class TargetRunner(Runner):
    """The target over ragged batches.

    Args:
        widest: most rows of a request in a decoding step, B.
    """

    def __init__(
        self,
        target: TargetModel,
        cache: KVCache,
        widest: int,
        *,
        static: bool | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        super().__init__(cache, static=static, pool=pool)
        self.target, self.widest = target, widest
        weights = sum(tensor.nbytes for tensor in target.parameters())
        key = 2 * cache.keys[:, 0, :, 0].numel() * cache.keys.element_size()  # bytes of one position's K/V
        self.shapes = self._shapes(widest)._replace(pass_keys=weights / (READS_OF_PADDING * key))
        # First position and anchor of the next block of each entry, int64 [entries, 2]: see `block_step`.
        self.state = torch.zeros(cache.entries, 2, dtype=torch.int64, device=cache.keys.device)

    def passes(self, layer_ids: tuple[int, ...], widths: Collection[int]) -> Iterator[tuple[Shape, tuple[int, ...]]]:
        """Decoding passes of these widths: shapes with features of these layers, and those of width 1 without, too."""
        for shape in self.shapes.all(widths):
            for features in {layer_ids, ()} if shape.width == 1 else {layer_ids}:
                yield shape, features

    def __call__(self, rows: Sequence[list[int]], spans: Sequence[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        """Token ids of each span's rows -> hidden [rows, H] and features [rows, F*H]; K/V goes into the cache."""
        parts = self.shapes.parts(spans) if self.static else []
        if len(parts) < 2:
            return self._pass(rows, spans, layer_ids)
        hidden: dict[int, Tensor] = {}
        features: dict[int, Tensor] = {}
        for part in parts:
            output = self._pass([rows[n] for n in part], [spans[n] for n in part], layer_ids)
            counts = [spans[n].length for n in part]
            # Copied, since the next part's graph may overwrite them.
            hidden.update(zip(part, output.hidden.clone().split(counts), strict=True))
            if output.features is not None:
                features.update(zip(part, output.features.clone().split(counts), strict=True))
        joined = [torch.cat([found[n] for n in sorted(found)]) for found in (hidden, features) if found]
        return TargetOutput(joined[0], joined[1] if features else None)

    def _pass(self, rows: Sequence[list[int]], spans: Sequence[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        shape = self.shapes.fit(spans) if self.static else None
        if shape is not None:
            table, real = to_device(shape.table(spans, rows), self.target.device), shape.real_rows(spans)
            work = partial(self.blocks, shape=shape, layer_ids=layer_ids)
            hidden, *features = self.run(shape, layer_ids, work, table)
            kept = real if isinstance(real, slice) else to_device(real, self.target.device)
            return TargetOutput(hidden[kept], features[0][kept] if features else None)
        token_ids = to_device([token for row in rows for token in row], self.target.device)
        attend = self.target.attention(self.cache, spans)
        output: TargetOutput = self.target(token_ids, span_positions(spans, self.target.device), attend, layer_ids)
        return output

    def blocks(self, table: Tensor, shape: Shape, layer_ids: tuple[int, ...]) -> tuple[Tensor, ...]:
        """A padded pass over blocks, for a graph: hidden [N * W, H], and features [N * W, F*H] of the layers if any.

        Args:
            table: int64 [N, 2 + W] of this shape: the entry, the first position and the token ids of each block.
        """
        positions, attend = self._padded(table, shape, self.target)
        output = self.target(table[:, 2:].reshape(-1), positions.reshape(-1), attend, layer_ids)
        return (output.hidden,) if output.features is None else (output.hidden, output.features)


class DrafterRunner(Runner):
    """Runs a drafter over blocks [anchor, mask, ...] of any number of requests; `DrafterConfig.rows` is their size.

    Args:
        embedding: the target's [vocabulary, H].
        cache: the drafter's context K/V.
    """

    def __init__(self, embedding: Tensor, cache: KVCache, block_size: int, *, static: bool | None = None) -> None:
        super().__init__(cache, static=static)
        self.embedding, self.block_size = embedding, block_size

    def __call__(self, drafter: Drafter, anchors: list[int], starts: Sequence[tuple[int, int]]) -> Tensor:
        """Anchors, and (cache entry, position) of each -> hidden [requests * rows, H]; K/V is written there."""
        size = drafter.config.rows(self.block_size)
        spans = [Span(entry, start, size) for entry, start in starts]
        shape = self._shapes(size).fit(spans) if self.static else None
        if shape is not None:
            table = to_device(shape.table(spans, [[anchor] for anchor in anchors]), self.embedding.device)
            hidden = self.run(shape, drafter, partial(self.blocks, drafter, shape=shape), table)[0]
            return hidden[: len(spans) * size]
        noise = drafter.noise(to_device(anchors, self.embedding.device), self.embedding, self.block_size)
        attend = drafter.attention(self.cache, spans)
        out: Tensor = drafter(noise, span_positions(spans, noise.device), attend, block_size=self.block_size)
        return out

    def blocks(self, drafter: Drafter, table: Tensor, shape: Shape) -> tuple[Tensor]:
        """A padded pass over blocks [anchor, mask, ...], for a graph: hidden [N * rows, H].

        Args:
            table: int64 [N, 3 or more]: the entry, the first position and the anchor of each block.
            shape: its requests and length count; a block has the drafter's rows.
        """
        shape = shape._replace(width=drafter.config.rows(self.block_size))
        positions, attend = self._padded(table, shape, drafter)
        noise = drafter.noise(table[:, 2], self.embedding, self.block_size)
        return (drafter(noise, positions.reshape(-1), attend, block_size=self.block_size),)

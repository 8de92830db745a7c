"""The few shapes that decoding steps are padded to, so that each can be captured once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from dflash_serve.models.kv_cache import Span

SHORTEST = 256
"""Keys read at least; lengths double from here."""
LONGEST = 4096
"""Keys read at most: beyond, reading what is only padding would cost more than launching kernels one by one."""


class Shape(NamedTuple):
    """N requests of W rows each, which attend over the first `length` positions of their cache entries."""

    requests: int
    width: int
    length: int

    @property
    def spans(self) -> list[Span]:
        """Requests that need this shape."""
        return [Span(entry, self.length - self.width, self.width) for entry in range(self.requests)]


def shapes(*, max_batch_size: int, widest: int, capacity: int) -> list[Shape]:
    """All that `shape_of` may find, from small to large."""
    return [
        Shape(requests, width, length)
        for length in sizes(SHORTEST, min(capacity, LONGEST))
        for requests in sizes(1, max_batch_size)
        for width in sizes(1, widest)
    ]


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


def real_rows(spans: Sequence[Span], shape: Shape) -> slice | list[int]:
    """Which of the N x W rows are the spans' own."""
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
    """The first of those that is not below `number`."""
    return next(size for size in sizes(first, last) if size >= number)

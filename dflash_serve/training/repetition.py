"""When an answer has fallen into a loop."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 24
REPEATS = 4
SHORTEST_TAIL = 24


def repeated_tail(tokens: Sequence[int]) -> int:
    """The shortest period n <= 24 with which the tail repeats, 0 where it does not.

    The rule: the last max(4n, 24) tokens are one n-gram over and over, i.e. each equals the token n before it.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        tail = max(REPEATS * period, SHORTEST_TAIL)
        if len(tokens) < tail:
            continue
        last = tokens[-tail:]
        if last[period:] == last[:-period]:
            return period
    return 0

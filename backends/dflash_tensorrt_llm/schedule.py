"""`draft_len_schedule`: how many tokens are drafted by batch size, which makes `width: auto` real here.

Upstream reads a key as "up to this batch size" (PR #10860). Above the largest key, and at 0, it drafts nothing; the
drafter then never gets the features of those tokens, and accepts little for the rest of such a request, without an
error (PR #16888). So ours reaches up to the largest batch and always drafts one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel


def draft_lengths(cost: CostModel, survival: Sequence[float], block_size: int, max_batch_size: int) -> dict[int, int]:
    """Largest batch size of each stretch -> drafted tokens that pay there; the first is the most (upstream's rule)."""
    from dflash_serve.speculation.allocation import widths_by_batch  # numpy, which not every install has

    ((_, _, most),) = widths_by_batch(survival, cost, range(2, block_size + 1), 1)
    stretches = widths_by_batch(survival, cost, range(2, most + 1), max_batch_size)
    return {last: width - 1 for _, last, width in stretches}


def starving_from(lengths: Mapping[int, int], max_batch_size: int) -> int | None:
    """The least batch size at which a schedule drafts nothing; None = there is none."""
    sizes = sorted(lengths)
    ends = [0, *sizes]
    zero = (ends[place] + 1 for place, size in enumerate(sizes) if lengths[size] == 0)
    return next(zero, sizes[-1] + 1 if sizes[-1] < max_batch_size else None)

"""Values of stored tensors, read by numpy: NaN and infinity, zeros, and maps of a reduced draft vocabulary. No torch.

A number is judged by its bits, because numpy has no bfloat16 and no FP8. Without its sign, a NaN or infinite value is
at least the number whose exponent bits are all ones. Each fault of the maps that is checked here was seen in a
published drafter, and costs nearly all acceptance without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dflash_serve.checkpoint.files import PIECE, Header
from dflash_serve.errors import Problem

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]


class NumberFormat(NamedTuple):
    """Bits of the numbers of one safetensors dtype."""

    kind: str  # numpy's integers of this size
    magnitude: int  # all bits but the sign
    least_unusable: int | None = None  # magnitude of infinity, or of NaN where there is none; None = integers


FORMATS = {
    "F64": NumberFormat("<u8", 2**63 - 1, 0x7FF << 52),
    "F32": NumberFormat("<u4", 2**31 - 1, 0xFF << 23),
    "F16": NumberFormat("<u2", 2**15 - 1, 0x1F << 10),
    "BF16": NumberFormat("<u2", 2**15 - 1, 0xFF << 7),
    "F8_E4M3": NumberFormat("u1", 2**7 - 1, 0x7F),
    "I64": NumberFormat("<u8", 2**64 - 1),
    "I32": NumberFormat("<u4", 2**32 - 1),
    "I8": NumberFormat("u1", 2**8 - 1),
    "U8": NumberFormat("u1", 2**8 - 1),
    "BOOL": NumberFormat("u1", 2**8 - 1),
}
"""dtype -> numbers, for each dtype that a drafter's tensors may have."""
AGAIN = "download the drafter again, or export it again"


class Extent(NamedTuple):
    """Two facts about the values of a tensor."""

    unusable: int  # number of values that are NaN or infinite
    zero: bool  # no value differs from zero


def stored_bits(header: Header) -> Bits:
    """The tensor's numbers as unsigned integers, memory-mapped.

    Raises:
        ValueError: its bytes are not those of its shape.
    """
    kind = np.dtype(FORMATS[header.dtype].kind)
    if 0 in header.shape:
        return np.empty(header.shape, kind)
    if header.bytes != kind.itemsize * int(np.prod(header.shape, dtype=object)):
        raise ValueError(f"a tensor of shape {list(header.shape)} in {header.dtype} has {header.bytes} bytes")
    return np.memmap(header.file, kind, "r", header.start, header.shape or (1,)).reshape(header.shape)


def extent(bits: Bits, dtype: str) -> Extent:
    """The extent of numbers of a safetensors dtype, read in parts of some megabytes."""
    number, flat = FORMATS[dtype], bits.reshape(-1)
    unusable, zero = 0, True
    for start in range(0, flat.size, PIECE):
        magnitudes = flat[start : start + PIECE] & flat.dtype.type(number.magnitude)
        most = int(magnitudes.max())
        zero = zero and most == 0
        if number.least_unusable is not None and most >= number.least_unusable:
            unusable += int((magnitudes >= number.least_unusable).sum())
    return Extent(unusable, zero)


def unusable_problem(name: str, unusable: int, count: int, file: Path, do: str) -> Problem:
    """The problem of a tensor with NaN or infinite values."""
    return Problem(f"tensor {name} has {unusable} values that are NaN or infinite, of {count}", str(file), do)


def map_problems(d2t: NDArray[np.int64], vocab_size: int, where: Path) -> Iterator[Problem]:
    """Problems of a `d2t`: draft ids must map to target ids in rising order."""
    ids = np.arange(len(d2t)) + d2t
    if _rises_within(ids, vocab_size):
        return
    if _rises_within(d2t, vocab_size):
        what = "tensor d2t holds target ids, not differences target id - draft id"
        yield Problem(what, str(where), "subtract 0, 1, 2, ... from it")
        return
    bad = int(((ids < 0) | (ids >= vocab_size)).sum())
    fault = (
        f"sends {bad} draft ids outside the vocabulary of {vocab_size}" if bad else "does not rise with the draft id"
    )
    yield Problem(f"tensor d2t {fault}", str(where), AGAIN)


def _rises_within(ids: NDArray[np.int64], vocab_size: int) -> bool:
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def mask_problems(d2t: NDArray[np.int64], t2d: NDArray[np.bool_], where: Path) -> Iterator[Problem]:
    """Problems of a `t2d` beside a sound `d2t`: both must name the same tokens."""
    ids = np.arange(len(d2t)) + d2t
    (marked,) = t2d.nonzero()
    if len(marked) != len(ids):
        yield Problem(f"tensor t2d marks {len(marked)} tokens but d2t maps {len(ids)}", str(where), AGAIN)
    elif not np.array_equal(marked, ids):
        differing = int((marked != ids).sum())
        yield Problem(f"tensors t2d and d2t name different tokens ({differing} of {len(ids)})", str(where), AGAIN)

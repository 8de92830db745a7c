"""Keeps freed memory instead of handing it back to the operating system at every step (Linux, glibc).

Training frees and takes back the same tens of megabytes in every layer; each time their pages would be zeroed anew.
Measured on 2 cores (SmolLM2-135M in bf16, 6,400 rows): 1,830 rows/s without, 3,900 with both measures.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
GIB = 1 << 30


def keep_freed_memory() -> None:
    """Tunes malloc and oneDNN; call it before torch is first imported: torch and oneDNN read their switches once."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Every length of a context is a shape of its own, and oneDNN compiles a kernel for each: keep them all.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    with contextlib.suppress(OSError, AttributeError):  # another C library: slower, no worse
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, GIB)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * GIB - 1)
        libc.mallopt(M_TOP_PAD, GIB // 4)

"""The compiled operators over tensors: those of `layers.PlainOperators`, each in one pass over the rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.attention import Attend, PlainOperators, ProjectedAttention, ragged_attention
from dflash_serve.models.compiled.build import Kernel, kernel, kernels_id, load_kernels
from dflash_serve.models.kv_cache import KVCache, Span

DTYPES = (torch.float32, torch.bfloat16)
WORTH_THREADS = 2**16  # smallest number of values read or written for which a second thread saves time
MOST_PAIRS = 2**20
"""Largest rows x keys of a span; longer prefills use PyTorch. At this size the threads' partial results (512 keys each)
take 32 MB for rows of 4,096 values."""
MOST_DIM = 1024  # largest head dimension, a limit of the C++ source


def compiled_operators(dtype: torch.dtype, device: torch.device) -> CompiledOperators | None:
    """Compiled operators of float32 or bfloat16 on a CPU; None elsewhere, or if they cannot be compiled."""
    if device.type != "cpu" or dtype not in DTYPES:
        return None
    library = load_kernels()
    return None if library is None else CompiledOperators(library, dtype)


class CompiledOperators(PlainOperators):
    """Compiled operators of one dtype. Not differentiable; tensors must be contiguous, as linear layers return them."""

    name = "compiled"

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.kernels = kernels_id()
        ending = str(dtype).removeprefix("torch.")
        self._add_norm, self._silu_product, self.attend = (
            kernel(library, f"{name}_{ending}", signature)
            for name, signature in (("add_norm", "ppppllfi"), ("silu_product", "pplli"), ("attend", "pppppppplppi"))
        )

    def __deepcopy__(self, memo: object) -> CompiledOperators:  # a copy of a model uses the same library
        return self

    def add_norm(self, h: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """(h + delta, its norm), all [rows, H]; `h` is changed in place."""
        rows, size = h.shape
        out = torch.empty_like(h)
        threads = _threads(rows * size)
        added = None if delta is None else delta.data_ptr()
        self._add_norm(h.data_ptr(), added, norm.weight.data_ptr(), out.data_ptr(), rows, size, norm.eps, threads)
        return h, out

    def silu_product(self, gate_up: Tensor) -> Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_product(gate_up.data_ptr(), out.data_ptr(), rows, size, _threads(rows * size))
        return out


def step_attention(
    operators: PlainOperators,
    cache: KVCache,
    spans: Sequence[Span],
    kinds: Sequence[AttentionKind],
    heads: int,
    eps: float,
) -> Attend | ProjectedAttention:
    """Attention of one step over a flat batch of spans: compiled, or PyTorch's for long spans and large heads."""
    pairs = max(span.length * (span.start + span.length) for span in spans)
    fits = pairs <= MOST_PAIRS and cache.keys.shape[-1] <= MOST_DIM
    if isinstance(operators, CompiledOperators) and fits:
        return CompiledAttention(operators.attend, cache, spans, kinds, heads, eps)
    return ragged_attention(cache, spans, kinds, heads, flashinfer=operators.flashinfer)


class _Shape(ctypes.Structure):
    # `Shape` in attention.cpp.

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "capacity", "window")),
        ("causal", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


class CompiledAttention(ProjectedAttention):
    """Attention of one step over a K/V cache, from projected rows: with norms, rotation and K/V writes."""

    def __init__(
        self,
        attend: Kernel,
        cache: KVCache,
        spans: Sequence[Span],
        kinds: Sequence[AttentionKind],
        heads: int,
        eps: float,
    ) -> None:
        _, _, kv_heads, capacity, dim = cache.keys.shape
        self.attend, self.cache, self.heads = attend, cache, heads
        shapes = {k: _Shape(heads, kv_heads, dim, capacity, k.window or 0, k.causal, eps) for k in set(kinds)}
        self.shapes = [shapes[kind] for kind in kinds]
        self.count, flat, row = len(spans), [], 0
        for entry, start, length in spans:
            if start + length > capacity or not 0 <= entry < cache.entries:
                raise IndexError(f"a span of {length} rows at {start} of entry {entry} is outside the K/V cache")
            flat += [entry, start, length, row]
            row += length
        self.spans = (ctypes.c_int64 * len(flat))(*flat)
        read = sum((span.start + span.length) * span.length for span in spans) * heads * dim
        self.threads = _threads(read)

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Sequence[nn.RMSNorm] | None
    ) -> Tensor:
        shape = self.shapes[layer]
        out = qkv.new_empty(len(qkv), self.heads * shape.dim)
        weights = (None, None) if qk_norm is None else (qk_norm[0].weight.data_ptr(), qk_norm[1].weight.data_ptr())
        self.attend(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            *weights,
            self.cache.keys[layer].data_ptr(),
            self.cache.values[layer].data_ptr(),
            ctypes.addressof(self.spans),
            self.count,
            out.data_ptr(),
            ctypes.addressof(shape),
            self.threads,
        )
        return out


def _threads(numbers: int) -> int:
    return torch.get_num_threads() if numbers > WORTH_THREADS else 1

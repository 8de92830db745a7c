"""Step times without the engine's own time, with the provenance of each millisecond.

`StepTimes` has two providers: `tables.Tables` (operators that were measured on a GPU) and `Roofline` (bytes, arithmetic
and the data sheet), for machines without the tables and models that they do not have. The roofline knows nothing of
kernels: it is optimistic about small batches, and says little of TP and quantised formats.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Protocol

from dflash_serve.checkpoint.config import DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.deployment import GPUS, Gpu, Model


@dataclass(frozen=True)
class Milliseconds:
    """A time and its provenance: the parts add up to it."""

    measured: float = 0.0
    """From a table of operators that were measured on this GPU, interpolated between its points."""
    interpolated: float = 0.0
    """Composed of measured and modelled parts, or transferred from another table."""
    roofline: float = 0.0
    """From bytes, arithmetic and the GPU's data sheet."""
    constants: float = 0.0
    """The engine's own time between kernels."""

    @property
    def total(self) -> float:
        return self.measured + self.interpolated + self.roofline + self.constants

    def __add__(self, other: Milliseconds) -> Milliseconds:
        return Milliseconds(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> Milliseconds:
        """All parts alike."""
        return Milliseconds(*(part * factor for part in astuple(self)))

    def shares(self) -> dict[str, float]:
        """Provenance -> its share of the time."""
        return {name: part / self.total if self.total else 0.0 for name, part in asdict(self).items()}


@dataclass(frozen=True)
class Split:
    """Tensor and expert parallelism of one copy of the model."""

    tensor: int = 1
    expert: int = 1
    """1, or as many as `tensor`: experts are shared out instead of sliced."""

    def __str__(self) -> str:
        return f"TP {self.tensor}" + (f", EP {self.expert}" if self.expert > 1 else "")


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, as far as their configurations tell."""

    model: Model
    folder: Path
    """Folder with the target's config.json."""
    layout: TargetLayout
    drafter: DrafterConfig
    assumed: str | None = None
    """The assumption about the drafter, where none was named."""
    kv_bytes_each: float = 2.0
    """Bytes of one number in the target's K/V cache."""


class StepTimes(Protocol):
    """Step times of one split on one GPU, without the engine's own time."""

    @property
    def basis(self) -> str:
        """The source of the figures, in words."""
        ...

    def verify(self, batch: int, width: int, context: int) -> Milliseconds:
        """The target's pass over `width` slots of each of `batch` requests, each with `context` tokens before them."""
        ...

    def draft(self, batch: int, block_size: int, context: int) -> Milliseconds:
        """The drafter's pass over a block for each request, new context features and the head included."""
        ...

    def prefill(self, prompts: int, tokens: int) -> Milliseconds:
        """The target's pass over so many prompts of `tokens` tokens each."""
        ...

    def kv_tokens(self, context: int = 1) -> int:
        """Tokens of all requests, each of `context` tokens, that fit into memory beside both models."""
        ...


@dataclass(frozen=True)
class Specification:
    """A GPU's data sheet (dense figures), and what the operator tables call it."""

    gpu: Gpu
    system: str
    bandwidth: float
    """Bytes/s of its memory."""
    flops: float
    """bf16, per second; FP8 has twice, FP4 four times as many (FP4 on Blackwell alone)."""
    link: float
    """Bytes/s to its neighbours, one way."""


SPECIFICATIONS = {
    each.gpu.name: each
    for each in (
        Specification(GPUS["h100"], "h100_sxm", 3.35e12, 0.99e15, 450e9),
        Specification(GPUS["h200"], "h200_sxm", 4.8e12, 0.99e15, 450e9),
        Specification(GPUS["b200"], "b200_sxm", 7.7e12, 2.25e15, 900e9),
        Specification(GPUS["b300"], "b300_sxm", 7.75e12, 2.25e15, 900e9),
        Specification(GPUS["gb200"], "gb200", 8.0e12, 2.5e15, 900e9),
        Specification(GPUS["gb300"], "gb300", 8.0e12, 2.5e15, 900e9),
    )
}
OF_BANDWIDTH, OF_FLOPS = 0.8, 0.7
"""Shares of the data sheet that large copies and large matrix products reach."""
ALL_REDUCE_MS = 0.008
"""Latency of one all-reduce among GPUs of one node."""
MEMORY_SHARE = 0.85
"""Share of a GPU's memory for weights and K/V."""
FASTER = {"fp8": 2.0, "nvfp4": 4.0, "mxfp4": 4.0}
BITS = {"fp8": 8.0, "nvfp4": 4.5, "mxfp4": 4.25}


@dataclass(frozen=True)
class Roofline:
    """`StepTimes` from the data sheet."""

    pair: Pair
    on: Specification
    split: Split

    @property
    def basis(self) -> str:
        return f"roofline of the {self.on.gpu.name.upper()}'s data sheet"

    def verify(self, batch: int, width: int, context: int) -> Milliseconds:
        layout = self.pair.layout
        cached = (layout.kv_bytes(self.pair.kv_bytes_each, context) + 2 * layout.state_bytes) * batch
        return self._pass(
            self._weights(batch * width), self._active_parameters, batch * width, cached, layout.shape.num_layers
        )

    def draft(self, batch: int, block_size: int, context: int) -> Milliseconds:
        drafter = self.pair.drafter
        head = 2 * drafter.vocab_size * drafter.hidden_size
        read, rows = weight_bytes(drafter) + head, batch * block_size
        cached = sum(min(context + block_size, kind.window or context + block_size) for kind in drafter.layers)
        per_layer = context_bytes(drafter) / drafter.num_layers
        return self._pass(read, read / 2, rows, batch * cached * per_layer, drafter.num_layers)

    def prefill(self, prompts: int, tokens: int) -> Milliseconds:
        return self.verify(prompts, tokens, tokens // 2)

    def kv_tokens(self, context: int = 1) -> int:
        layout, drafter, tensor = self.pair.layout, self.pair.drafter, self.split.tensor
        head_share = max(1, layout.kv_heads // tensor) / layout.kv_heads  # K/V heads are repeated, not split further
        free = MEMORY_SHARE * self.on.gpu.memory - (layout.weight_bytes + weight_bytes(drafter)) / tensor
        each = layout.kv_bytes(self.pair.kv_bytes_each, context) / context * head_share
        each += layout.state_bytes * (1 + drafter.block_size) / tensor / context  # one state for every slot, too
        own = context_bytes(drafter, max(1, drafter.num_key_value_heads // tensor))
        return max(0, int(free / (each + own)))

    @property
    def _precision(self) -> str:
        asked = self.pair.model.quantization
        return asked if asked != "none" else self.pair.layout.native_quantization or "none"

    @property
    def _active_parameters(self) -> float:
        # Parameters that one token is multiplied with.
        layout, bits = self.pair.layout, BITS.get(self._precision, 16.0)
        chosen = layout.experts_per_token / layout.experts if layout.experts else 0.0
        outside = 16.0 if self._precision == "mxfp4" else bits
        return 8 * ((layout.weight_bytes - layout.expert_bytes) / outside + layout.expert_bytes * chosen / bits)

    def _weights(self, rows: int) -> float:
        # Bytes read. An expert is read where some row uses it; rows are taken as choosing independently.
        layout = self.pair.layout
        if not layout.experts:
            return float(layout.weight_bytes)
        touched = 1 - (1 - layout.experts_per_token / layout.experts) ** rows
        return layout.weight_bytes - layout.expert_bytes * (1 - touched)

    def _pass(self, read: float, parameters: float, rows: int, cached: float, layers: int) -> Milliseconds:
        on, tensor = self.on, self.split.tensor
        speed = on.flops * (FASTER.get(self._precision, 1.0) if on.gpu.is_blackwell else 1.0)
        memory = (read + cached) / tensor / (OF_BANDWIDTH * on.bandwidth)
        arithmetic = 2 * parameters * rows / tensor / (OF_FLOPS * speed)
        total = 1e3 * (memory + arithmetic)
        if tensor > 1:
            moved = 2 * rows * self.pair.layout.shape.hidden_size
            total += 2 * layers * (ALL_REDUCE_MS + 1e3 * moved / on.link)
        return Milliseconds(roofline=total)

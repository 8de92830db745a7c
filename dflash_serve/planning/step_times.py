"""What a step takes: the interface of its two providers, and milliseconds that know where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.deployment import Gpu, Model


@dataclass(frozen=True)
class Milliseconds:
    """A time and its provenance: the parts add up to it."""

    measured: float = 0.0
    """From a table of operators that somebody ran on this GPU, interpolated between its points."""
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
        return Milliseconds(
            self.measured + other.measured,
            self.interpolated + other.interpolated,
            self.roofline + other.roofline,
            self.constants + other.constants,
        )

    def times(self, factor: float) -> Milliseconds:
        """All parts alike."""
        return Milliseconds(
            self.measured * factor, self.interpolated * factor, self.roofline * factor, self.constants * factor
        )

    def shares(self) -> dict[str, float]:
        """Provenance -> its share of the time; 0 is left out."""
        parts = {name: getattr(self, name) for name in ("measured", "interpolated", "roofline", "constants")}
        return {name: part / self.total for name, part in parts.items() if part and self.total}


@dataclass(frozen=True)
class Split:
    """How one copy of the model is laid over GPUs."""

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
    """It has the target's config.json."""
    layout: TargetLayout
    drafter: DrafterConfig
    assumed: str | None = None
    """What was assumed of the drafter, where none was named."""
    kv_bytes_each: float = 2.0
    """Of one number of the target's K/V cache."""


class StepTimes(Protocol):
    """What one split on one GPU takes; no engine's own time is in it."""

    @property
    def basis(self) -> str:
        """Where the figures come from, in words."""
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

    def kv_tokens(self) -> int:
        """Tokens of all requests that fit into memory beside both models, the drafter's K/V counted."""
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

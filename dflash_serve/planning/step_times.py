"""Step times: milliseconds that know where they come from, the roofline, and an engine's own time between kernels.

`StepTimes` has two providers: `tables.Tables` (operators that were measured on a GPU) and `Roofline` (bytes, arithmetic
and the data sheet). The roofline knows nothing of kernels: it is optimistic about small batches, and says little of TP
and quantised formats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError

from dflash_serve.checkpoint.config import DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.common.settings import Frozen, describe
from dflash_serve.deployment import GPUS, Gpu, Model
from dflash_serve.errors import UserError, did_you_mean


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
        cached = layout.kv_bytes(self.pair.kv_bytes_each) * batch * context
        return self._pass(self._weights(batch * width), self._active_parameters, batch * width, cached, 1.0)

    def draft(self, batch: int, block_size: int, context: int) -> Milliseconds:
        drafter = self.pair.drafter
        head = 2 * drafter.vocab_size * drafter.hidden_size
        read, rows = weight_bytes(drafter) + head, batch * block_size
        cached = sum(min(context + block_size, kind.window or context + block_size) for kind in drafter.layers)
        per_layer = context_bytes(drafter) / drafter.num_layers
        return self._pass(read, read / 2, rows, batch * cached * per_layer, drafter.num_layers / self._layers)

    def prefill(self, prompts: int, tokens: int) -> Milliseconds:
        return self.verify(prompts, tokens, tokens // 2)

    def kv_tokens(self) -> int:
        layout, drafter, tensor = self.pair.layout, self.pair.drafter, self.split.tensor
        head_share = max(1, layout.kv_heads // tensor) / layout.kv_heads  # K/V heads are repeated, not split further
        free = MEMORY_SHARE * self.on.gpu.memory - (layout.weight_bytes + weight_bytes(drafter)) / tensor
        each = layout.kv_bytes(self.pair.kv_bytes_each) * head_share
        own = context_bytes(drafter, max(1, drafter.num_key_value_heads // tensor))
        return max(0, int(free / (each + own)))

    @property
    def _layers(self) -> int:
        return self.pair.layout.shape.num_layers

    @property
    def _precision(self) -> str:
        asked = self.pair.model.quantization
        return asked if asked != "none" else self.pair.layout.native_quantization or "none"

    @property
    def _active_parameters(self) -> float:
        # Parameters that one token is multiplied with.
        layout = self.pair.layout
        chosen = layout.experts_per_token / layout.experts if layout.experts else 0.0
        dense = layout.weight_bytes - layout.expert_bytes
        outside = 16.0 if self._precision == "mxfp4" else BITS.get(self._precision, 16.0)
        inside = BITS.get(self._precision, 16.0)
        return 8 * (dense / outside + layout.expert_bytes * chosen / inside)

    def _weights(self, rows: int) -> float:
        # Bytes read. An expert is read where some row uses it; rows are taken as choosing independently.
        layout = self.pair.layout
        if not layout.experts:
            return float(layout.weight_bytes)
        touched = 1 - (1 - layout.experts_per_token / layout.experts) ** rows
        return layout.weight_bytes - layout.expert_bytes * (1 - touched)

    def _pass(self, read: float, parameters: float, rows: int, cached: float, depth: float) -> Milliseconds:
        # `depth`: number of layers relative to the target's.
        on, tensor = self.on, self.split.tensor
        speed = on.flops * (FASTER.get(self._precision, 1.0) if on.gpu.is_blackwell else 1.0)
        memory = (read + cached) / tensor / (OF_BANDWIDTH * on.bandwidth)
        arithmetic = 2 * parameters * rows / tensor / (OF_FLOPS * speed)
        total = 1e3 * (memory + arithmetic)
        if tensor > 1:
            moved = 2 * rows * self.pair.layout.shape.hidden_size
            total += 2 * self._layers * depth * (ALL_REDUCE_MS + 1e3 * moved / on.link)
        return Milliseconds(roofline=total)


FILE = "constants.json"
Evidence = Literal["fitted", "implied", "assumed", "calibrated"]


class Constants(Frozen):
    """Own time of one engine in one mode, in milliseconds:

    plain step = scale * verify(b, 1) + plain_step + plain_request * b
    speculative step = scale * (verify(b, w) + draft(b, B)) + speculative_step + speculative_request * b
    """

    name: str
    backend: str
    engine_version: str
    attention_backend: str
    overlap: bool
    """The engine prepares a step while the one before it runs."""
    tables: str
    """The engine whose operator tables these belong to."""
    scale: PositiveFloat = 1.0
    plain_step: NonNegativeFloat
    speculative_step: NonNegativeFloat
    plain_request: NonNegativeFloat
    speculative_request: NonNegativeFloat
    evidence: Evidence
    """fitted: to published or measured rows; implied: by a few cells; assumed: bounded by cross-checks alone;
    calibrated: to a bench of the user's."""
    source: str
    """The rows that were fitted, or another origin."""
    plain_error: Annotated[float, Field(gt=0, lt=1)]
    """Mean relative error of tokens/s without speculation, where it was held against measurements."""
    error: Annotated[float, Field(gt=0, lt=1)]
    """Mean relative error with speculation, on targets, engines or GPUs outside the fit where there are any."""

    def of_step(self, batch: int, *, speculates: bool) -> Milliseconds:
        """The engine's part of a step."""
        step, request = (
            (self.speculative_step, self.speculative_request) if speculates else (self.plain_step, self.plain_request)
        )
        return Milliseconds(constants=step + request * batch)


class ConstantsFile(Frozen):
    """Sets of constants; the first of a backend is its default."""

    sets: Annotated[list[Constants], Field(min_length=1)]


def known_constants() -> list[Constants]:
    """Sets that come with this package."""
    text = (files(__package__) / FILE).read_text(encoding="utf-8")
    return ConstantsFile.model_validate_json(text).sets


def constants_of(backend: str, asked: str | None) -> Constants:
    """The constants of a backend.

    Args:
        asked: the name of a known set, or a JSON file of one (`plan --calibrate` writes it); None = the default.

    Raises:
        UserError: nothing is known of this engine, or there is no such set.
    """
    known = [each for each in known_constants() if each.backend == backend]
    if asked is not None and Path(asked).suffix == ".json":
        return read_constants(Path(asked))
    if asked is not None:
        names = [each.name for each in known]
        found = [each for each in known if each.name == asked]
        if not found:
            do = (
                did_you_mean(asked, names)
                or f"known of {backend} are: {', '.join(names) or 'none'}; or give a JSON file"
            )
            raise UserError(f"no constants {asked!r}", where="--constants", do=do)
        return found[0]
    if not known:
        have = ", ".join(dict.fromkeys(each.backend for each in known_constants()))
        what = f"nothing is known of how long {backend} takes between kernels"
        raise UserError(what, where=f"--backend {backend}", do=f"use one of {have}, or give --constants a JSON file")
    return known[0]


def read_constants(path: Path) -> Constants:
    """One set from a file.

    Raises:
        UserError: it cannot be read, or is no set of constants.
    """
    try:
        return Constants.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except ValidationError as error:
        raise UserError(
            f"no constants ({describe(error)})", where=str(path), do="let `plan --calibrate` write it"
        ) from None


def constants_json(constants: Constants) -> str:
    """For a file that `read_constants` reads."""
    return json.dumps(constants.model_dump(), indent=1, ensure_ascii=False) + "\n"

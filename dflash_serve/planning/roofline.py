"""Step times from bytes, arithmetic and the data sheet: for what the operator tables cannot price, or without them.

Knows nothing of kernels: it is optimistic about small batches, and says little of TP and quantised formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_serve.checkpoint.config import context_bytes, weight_bytes
from dflash_serve.deployment import GPUS
from dflash_serve.planning.step_times import Milliseconds, Pair, Specification, Split

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
"""Of a GPU's memory, for weights and K/V."""
FASTER = {"fp8": 2.0, "nvfp4": 4.0, "mxfp4": 4.0}
BITS = {"fp8": 8.0, "nvfp4": 4.5, "mxfp4": 4.25}


@dataclass(frozen=True)
class Roofline:
    """`StepTimes` by hand."""

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
        """Weights that one token goes through."""
        layout = self.pair.layout
        chosen = layout.experts_per_token / layout.experts if layout.experts else 0.0
        dense = layout.weight_bytes - layout.expert_bytes
        outside = 16.0 if self._precision == "mxfp4" else BITS.get(self._precision, 16.0)
        inside = BITS.get(self._precision, 16.0)
        return 8 * (dense / outside + layout.expert_bytes * chosen / inside)

    def _weights(self, rows: int) -> float:
        """Bytes read: of experts, those that some row goes through, were they chosen independently."""
        layout = self.pair.layout
        if not layout.experts:
            return float(layout.weight_bytes)
        touched = 1 - (1 - layout.experts_per_token / layout.experts) ** rows
        return layout.weight_bytes - layout.expert_bytes * (1 - touched)

    def _pass(self, read: float, parameters: float, rows: int, cached: float, depth: float) -> Milliseconds:
        """`depth`: layers, as a share of the target's."""
        on, tensor = self.on, self.split.tensor
        speed = on.flops * (FASTER.get(self._precision, 1.0) if on.gpu.is_blackwell else 1.0)
        memory = (read + cached) / tensor / (OF_BANDWIDTH * on.bandwidth)
        arithmetic = 2 * parameters * rows / tensor / (OF_FLOPS * speed)
        total = 1e3 * (memory + arithmetic)
        if tensor > 1:
            moved = 2 * rows * self.pair.layout.shape.hidden_size
            total += 2 * self._layers * depth * (ALL_REDUCE_MS + 1e3 * moved / on.link)
        return Milliseconds(roofline=total)

"""TensorRT-LLM's own drafter with quantised weights: only the product that makes its context K/V is ours.

Upstream fuses the K/V rows of all layers' `qkv_proj.weight` into one product as they are stored, scales ignored
(`_build_fused_kv_buffers`, modeling_dflash.py @7c7504c). Here that product gets the same rows dequantised, from the
checkpoint itself: upstream's own are rescaled (FP8) or rearranged (NVFP4) by then. Everything else, its quantised
Linear, fused norms and RoPE, pages and attention kernels, runs as for a bf16 drafter. The rows cost 2 * layers * K/V
rows * H bf16 values: 84 MB of a drafter for Qwen3-8B on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.reader import assemble
from dflash_serve.checkpoint.tensors import Quantization

from .drafter import dtype_of, layout_of, read_draft_folder
from .weights import Layout, context_weight

UPSTREAM = "tensorrt_llm._torch.models.modeling_dflash"


class DequantisedContext:
    """Mixed into upstream's `DFlashForCausalLM`, whose names these are."""

    _fused_kv_weight: Tensor | None
    drafter_config: DrafterConfig
    quantization: Quantization | None
    layout: Layout
    context_dtype: torch.dtype
    context_rows: Tensor | None = None

    def load_weights(self, weights: Mapping[str, Tensor], weight_mapper: Any = None, **kwargs: Any) -> None:
        """Keeps the K/V rows of this rank, dequantised, and hands all on; loading again makes the product again.

        Raises:
            UserError: tensors that do not fit.
        """
        stored = dict(weights.items())
        whole = assemble(stored, self.drafter_config, self.quantization.format if self.quantization else None)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.context_rows = context_weight(whole, self.drafter_config, self.layout, self.context_dtype).to(device)
        self._fused_kv_weight = None
        super().load_weights(weights, weight_mapper=weight_mapper, **kwargs)  # type: ignore[misc]

    def _build_fused_kv_buffers(self) -> None:  # upstream's, with our rows in place of its raw ones
        if self._fused_kv_weight is None:
            super()._build_fused_kv_buffers()  # type: ignore[misc]
            self._fused_kv_weight = self.context_rows


def build(model_config: Any, draft_config: Any) -> Any:
    """This rank's drafter, from TensorRT-LLM's configs of target and draft.

    Raises:
        UserError: a drafter that cannot be read, or that does not split over the devices.
    """
    base = import_module(UPSTREAM).DFlashForCausalLM
    speculative = model_config.spec_config
    config, quantization = read_draft_folder(speculative.speculative_model)
    layout = layout_of(model_config.mapping)
    layout.check(config)
    made: type = type("DequantisedDFlash", (DequantisedContext, base), {"__module__": __name__})
    with _by_model_type(draft_config.pretrained_config):
        drafter = made(draft_config, dflash_attention_backend=speculative.attention_backend)
    drafter.drafter_config, drafter.quantization, drafter.layout = config, quantization, layout
    drafter.context_dtype = dtype_of(draft_config.pretrained_config)
    return drafter


@contextmanager
def _by_model_type(pretrained: Any) -> Iterator[None]:
    """Names the architecture that upstream falls back to; under its own name it would find `Unwanted`."""
    original = pretrained.architectures
    pretrained.architectures = ["".join(word.capitalize() for word in pretrained.model_type.split("_")) + "ForCausalLM"]
    try:
        yield
    finally:
        pretrained.architectures = original

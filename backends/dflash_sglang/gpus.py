"""The GPUs a Deployment can name, and which of SGLang's attention kernels serve DFlash on them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """`memory` is what a process finds free on an empty device, in bytes."""

    name: str
    memory: int
    attention: str
    """The target's, where its heads are plain (not DeepSeek's latent form)."""
    draft_attention: str
    """The drafter's block is not causal: trtllm_mha would be refused (`_resolve_dflash_draft_attention_backend`)."""
    fp4: bool


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 79 * GIB, "fa3", "fa3", fp4=False),
        Gpu("h200", 139 * GIB, "fa3", "fa3", fp4=False),
        Gpu("b200", 178 * GIB, "trtllm_mha", "fa4", fp4=True),
        Gpu("b300", 267 * GIB, "trtllm_mha", "fa4", fp4=True),
    )
}
"""B200 and B300 are what SGLang calls sm100 (compute capability 10.x)."""

"""Which of SGLang's attention kernels serve DFlash on which GPU."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_serve.gpus import Gpu


@dataclass(frozen=True)
class Kernels:
    """Names that SGLang's flags take."""

    target: str
    """Where the target's heads are plain (not DeepSeek's latent form)."""
    drafter: str
    """The drafter's block is not causal: trtllm_mha would be refused (`_resolve_dflash_draft_attention_backend`)."""


def kernels_of(gpu: Gpu) -> Kernels:
    """Those of Hopper or Blackwell (SGLang's sm100)."""
    return Kernels("trtllm_mha", "fa4") if gpu.is_blackwell else Kernels("fa3", "fa3")

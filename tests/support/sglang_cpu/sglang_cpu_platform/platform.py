"""The platform itself: no kernels of its own, PyTorch throughout."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch import Tensor

ATTENTION = "torch_native"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """What SGLang asks a device about."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_dispatch_key_name(self) -> str:
        return "native"  # every layer's plain PyTorch forward

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_speculative_cache_locs_fn(self) -> Any:
        return cache_locations


def cache_locations(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **_: Any
) -> Tensor:
    """The K/V entries of positions start..end of each request, one after the other."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end].to(torch.int64) for row, start, end in spans])

"""The NVIDIA GPUs of this machine, read through cuda-python's NVML: no torch, no CUDA context, nothing allocated.

Not run on a GPU yet; a test holds the names used here against the installed cuda-bindings (written for 13.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

NVLINKS = 18
"""Links asked for: what Hopper and Blackwell GPUs have at most."""


@dataclass(frozen=True)
class LocalGpu:
    """One device; memory in bytes."""

    name: str
    compute: int
    """90 = SM90."""
    memory: int
    free: int
    nvlinks: int
    """Active NVLinks."""


def local_gpus() -> list[LocalGpu] | None:
    """The GPUs, in NVML's order; [] where no driver answers, None = not known (the extra `[cuda]` is not installed)."""
    try:
        nvml = import_module("cuda.bindings.nvml")
    except ImportError:
        return None
    try:
        nvml.init_v2()
    except Exception:  # no library, no driver, no device: cuda-python has a class of its own for each
        return []
    try:
        handles = [nvml.device_get_handle_by_index_v2(index) for index in range(nvml.device_get_count_v2())]
        return [_read(nvml, handle) for handle in handles]
    finally:
        nvml.shutdown()


def _read(nvml: Any, handle: int) -> LocalGpu:
    major, minor = nvml.device_get_cuda_compute_capability(handle)
    memory = nvml.device_get_memory_info_v2(handle)
    links = sum(_active(nvml, handle, link) for link in range(NVLINKS))
    return LocalGpu(nvml.device_get_name(handle), 10 * major + minor, memory.total, memory.free, links)


def _active(nvml: Any, handle: int, link: int) -> bool:
    """False also where the device has no such link."""
    try:
        return bool(nvml.device_get_nvlink_state(handle, link) == nvml.EnableState.FEATURE_ENABLED)
    except (nvml.InvalidArgumentError, nvml.NotSupportedError):
        return False

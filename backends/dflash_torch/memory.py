"""Memory that a deployment needs on this machine, computed before anything is loaded. Needs no torch.

A K/V cache is reserved at once and backed by the system as it fills: a server with too large a cache would start and be
killed later. GPUs are read through cuda-python's NVML, which needs no CUDA context and allocates nothing. It ran on an
H200 with cuda-bindings 13.3; a test compares the names used with the installed ones (written for 13.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.config import BF16, DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem

GIB = 2**30
# Exists on machines with an NVIDIA driver, where the GPU's memory counts; only the extra `[cuda]` can read it.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# Requests at once where the deployment leaves the number open.
MOST_REQUESTS = 32
# Share of the free memory that K/V of an open number of requests may take; activations and other processes need some.
USED_SHARE = 0.8
# Most links of a Hopper or Blackwell GPU.
NVLINKS = 18


def memory_problems(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None) -> list[Problem]:
    """A problem if weights and K/V caches need more than the free memory; none where that is not known."""
    free, on_gpu = _free(deployment)
    needed = needed_bytes(deployment, target, drafter, on_gpu=on_gpu)
    if free is None or needed <= free:
        return []
    what = f"weights and K/V need {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
    do = "lower limits.max_batch_size or limits.max_model_len, or use a smaller model"
    return [Problem(what, "limits", do)]


def fitting_batch(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None) -> int:
    """Number of requests whose K/V at full length fits: a power of two from 1 to `MOST_REQUESTS`."""
    free, on_gpu = _free(deployment)
    if free is None:
        return MOST_REQUESTS
    for batch in (MOST_REQUESTS >> halvings for halvings in range(MOST_REQUESTS.bit_length())):
        if needed_bytes(deployment, target, drafter, on_gpu=on_gpu, batch=batch) <= free * USED_SHARE:
            return batch
    return 1


def _free(deployment: Deployment) -> tuple[int | None, bool]:
    """Free bytes (None = not known); True = on a GPU."""
    gpus = [] if deployment.hardware.gpu == "none" else local_gpus()
    free = gpus[0].free if gpus else None if gpus is None and NVIDIA_DRIVER.exists() else free_bytes()
    return free, bool(gpus)


def needed_bytes(
    deployment: Deployment,
    target: TargetLayout,
    drafter: DrafterConfig | None,
    *,
    on_gpu: bool = False,
    batch: int | None = None,
) -> int:
    """Bytes of the weights and of the K/V caches of all requests (one if their number is open) at full length."""
    dtype, limits = deployment.hardware.dtype, deployment.limits
    size = 2 if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else 4
    rows = (batch or limits.max_batch_size or 1) * (limits.max_model_len or target.shape.max_position_embeddings or 0)
    in_bf16 = target.weight_bytes + rows * target.kv_bytes(BF16)
    if drafter is not None:
        in_bf16 += weight_bytes(drafter) + rows * context_bytes(drafter)
    return in_bf16 * size // BF16


def free_bytes() -> int | None:
    """Available memory of a Linux machine; None = not known."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


@dataclass(frozen=True)
class LocalGpu:
    """An NVIDIA GPU of this machine; memory in bytes."""

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
    except Exception:  # no library, no driver, no device: cuda-python has an exception class for each
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
    """False also for a link that the device does not have."""
    try:
        return bool(nvml.device_get_nvlink_state(handle, link) == nvml.EnableState.FEATURE_ENABLED)
    except (nvml.InvalidArgumentError, nvml.NotSupportedError):
        return False

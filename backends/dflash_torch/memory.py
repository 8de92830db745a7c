"""Whether a deployment fits into this machine's memory, by arithmetic, before anything is loaded. Needs no torch.

A K/V cache is reserved at once and backed by the system as it fills: too large a one would start and be killed later.
GPUs are read through cuda-python's NVML: no torch, no CUDA context, nothing allocated. It ran on an H200 with
cuda-bindings 13.3; a test holds the names used against the installed ones (written for 13.5).
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
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Where it is, a GPU's own memory decides, which only the extra `[cuda]` can read."""
MOST_REQUESTS = 32
"""Requests at once where the deployment does not say how many."""
USED_SHARE = 0.8
"""Of the free memory that is taken unasked: others need some, and activations do."""
NVLINKS = 18
"""Links asked for: what Hopper and Blackwell GPUs have at most."""


def memory_problems(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None) -> list[Problem]:
    """One where weights and K/V caches together are more than what is free; none where that is not known."""
    free, on_gpu = _free(deployment)
    needed = needed_bytes(deployment, target, drafter, on_gpu=on_gpu)
    if free is None or needed <= free:
        return []
    what = f"weights and K/V need {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
    do = "lower limits.max_batch_size or limits.max_model_len, or use a smaller model"
    return [Problem(what, "limits", do)]


def fitting_batch(deployment: Deployment, target: TargetLayout, drafter: DrafterConfig | None) -> int:
    """Requests whose K/V at full length the free memory holds: a power of two up to `MOST_REQUESTS`, at least 1."""
    free, on_gpu = _free(deployment)
    if free is None:
        return MOST_REQUESTS
    for batch in (MOST_REQUESTS >> halvings for halvings in range(MOST_REQUESTS.bit_length())):
        if needed_bytes(deployment, target, drafter, on_gpu=on_gpu, batch=batch) <= free * USED_SHARE:
            return batch
    return 1


def _free(deployment: Deployment) -> tuple[int | None, bool]:
    """Free bytes (None = not known), and whether they are a GPU's."""
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
    """Weights, and the K/V caches of all requests at their full length; of one where their number is not given."""
    dtype, limits = deployment.hardware.dtype, deployment.limits
    size = 2 if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else 4
    rows = (batch or limits.max_batch_size or 1) * (limits.max_model_len or target.shape.max_position_embeddings or 0)
    in_bf16 = target.weight_bytes + rows * target.kv_bytes(BF16)
    if drafter is not None:
        in_bf16 += weight_bytes(drafter) + rows * context_bytes(drafter)
    return in_bf16 * size // BF16


def free_bytes() -> int | None:
    """Memory to be had on a Linux machine that computes on its CPU; None = not known."""
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

"""Whether a deployment fits into this machine's memory, by arithmetic, before anything is loaded. Needs no torch.

A K/V cache is reserved at once and backed by the system as it fills: too large a one would start and be killed later.
"""

from __future__ import annotations

from pathlib import Path

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.tensors import BF16, context_bytes, weight_bytes
from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem
from dflash_serve.models.target_config import TargetConfig

from .local_gpus import local_gpus

GIB = 2**30
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Where it is, a GPU's own memory decides, which only the extra `[cuda]` can read."""


def memory_problems(deployment: Deployment, target: TargetConfig, drafter: DrafterConfig | None) -> list[Problem]:
    """One where weights and K/V caches together are more than what is free; none where that is not known."""
    gpus = [] if deployment.hardware.gpu == "none" else local_gpus()
    free = gpus[0].free if gpus else None if gpus is None and NVIDIA_DRIVER.exists() else free_bytes()
    needed = needed_bytes(deployment, target, drafter, on_gpu=bool(gpus))
    if free is None or needed <= free:
        return []
    what = f"weights and K/V need {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
    do = "lower limits.max_batch_size or limits.max_model_len, or use a smaller model"
    return [Problem(what, "limits", do)]


def needed_bytes(
    deployment: Deployment, target: TargetConfig, drafter: DrafterConfig | None, *, on_gpu: bool = False
) -> int:
    """Weights, and the K/V caches of all requests at their full length."""
    dtype = deployment.hardware.dtype
    size = 2 if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else 4
    rows = deployment.limits.max_batch_size * (deployment.limits.max_model_len or target.max_position_embeddings)
    numbers = _weights(target) + target.vocab_size * target.hidden_size * (1 if target.tie_word_embeddings else 2)
    numbers += rows * _kv_row(target)
    if drafter is not None:
        numbers += weight_bytes(drafter) // BF16 + rows * context_bytes(drafter) // BF16
    return numbers * size


def _weights(config: TargetConfig) -> int:
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads  # q and o, k and v
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return layer * config.num_layers


def _kv_row(config: TargetConfig) -> int:
    return 2 * config.num_layers * config.num_key_value_heads * config.head_dim


def free_bytes() -> int | None:
    """Memory to be had on a Linux machine that computes on its CPU; None = not known."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None

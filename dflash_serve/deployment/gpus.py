"""GPUs that a Deployment can name."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
PER_NODE = 8
"""Largest number of GPUs in one node; an NVL72 rack counts as several nodes."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that a Deployment can name."""

    name: str
    memory: int
    """Bytes that are free for a process on an empty device."""
    compute: int
    """90 = SM90."""
    per_node: int = PER_NODE
    """Largest number of them in one node."""

    @property
    def is_blackwell(self) -> bool:
        """SM100 or SM103: has FP4 arithmetic and the trtllm-gen attention kernels."""
        return self.compute in (100, 103)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 79 * GIB, 90),
        Gpu("h200", 139 * GIB, 90),
        Gpu("b200", 178 * GIB, 100),
        Gpu("b300", 267 * GIB, 103),
        Gpu("gb200", 184 * GIB, 100, per_node=4),  # nvidia-smi: 189471 MiB
        Gpu("gb300", 276 * GIB, 103, per_node=4),  # nvidia-smi: 284208 MiB
    )
}

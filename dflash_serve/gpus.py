"""The GPUs a Deployment can name: memory and compute capability."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
PER_NODE = 8
"""Most GPUs of one node; NVL72 racks are reached as several nodes."""


@dataclass(frozen=True)
class Gpu:
    """`memory` is what a process finds free on an empty device, in bytes."""

    name: str
    memory: int
    compute: int
    """90 = SM90."""

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
    )
}

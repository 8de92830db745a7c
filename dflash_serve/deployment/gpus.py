"""GPUs that a Deployment can name: the one table of their memory, speed, number formats and kernels.

Sources: NVIDIA's data sheets (dense figures), and the system files of aiconfigurator-core 0.12.0, which were read from
such machines. RTX 5090: NVIDIA's RTX Blackwell whitepaper; bf16 and FP8 accumulate in fp32. RTX 6000D has no public
data sheet: 156 of the RTX PRO 6000's 188 multiprocessors, 448 of its 512 memory lines. GB10: 1 petaFLOP of sparse FP4
by NVIDIA; bf16 is a quarter of dense FP4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30
PER_NODE = 8
"""Largest number of GPUs in one node; an NVL72 rack counts as several nodes."""
A_PART = r".*(-\d+[A-Z]\b|\bMIG\b)"  # what follows a product's name in that of a vGPU or of a MIG slice
NVLINK, PCIE_4, PCIE_5 = 900e9, 32e9, 64e9  # Bytes/s to a neighbour, one way


@dataclass(frozen=True)
class Gpu:
    """A GPU that a Deployment can name."""

    name: str
    memory: int
    """Bytes that are free for a process on an empty device."""
    compute: int
    """90 = SM90."""
    bandwidth: float
    """Bytes/s of its memory."""
    flops: float
    """bf16, per second."""
    link: float
    """Bytes/s to its neighbours, one way."""
    product: str
    """Its name in nvidia-smi, as a regular expression between word boundaries."""
    system: str | None = None
    """Name of its operator tables in aiconfigurator-core; None = there are none."""
    per_node: int = PER_NODE
    """Largest number of them in one node."""
    arm: bool = False
    """Its CPU is a Grace (arm64)."""
    fp4: float = 4.0
    """Speed of FP4 arithmetic by bf16's, where it has any; that of FP8 is 2."""

    @property
    def has_fp8(self) -> bool:
        """Has FP8 arithmetic; without it engines unpack FP8 weights at each use."""
        return self.compute >= 89

    @property
    def has_fp4(self) -> bool:
        """Has FP4 arithmetic: every Blackwell."""
        return self.compute >= 100

    @property
    def is_sm100(self) -> bool:
        """SM100 or SM103: Blackwell of the data centre, which alone has the trtllm-gen attention kernels and FA4."""
        return self.compute in (100, 103)

    def speed(self, format: str) -> float:
        """Arithmetic per second in a number format; that of bf16 where it has none of this format."""
        if format == "fp8" and self.has_fp8:
            return 2 * self.flops
        return self.flops * (self.fp4 if format in ("nvfp4", "mxfp4") and self.has_fp4 else 1)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 79 * GIB, 80, 2.039e12, 0.312e15, 300e9, "A100-SXM4-80GB", "a100_sxm"),
        Gpu("l40s", 44 * GIB, 89, 0.864e12, 0.362e15, PCIE_4, "L40S", "l40s"),
        Gpu("h100", 79 * GIB, 90, 3.35e12, 0.99e15, 450e9, "H100 80GB HBM3", "h100_sxm"),
        Gpu("h200", 139 * GIB, 90, 4.8e12, 0.99e15, 450e9, "H200", "h200_sxm"),
        Gpu("b200", 178 * GIB, 100, 7.7e12, 2.25e15, NVLINK, "B200", "b200_sxm"),
        Gpu("b300", 267 * GIB, 103, 7.75e12, 2.25e15, NVLINK, "B300", "b300_sxm", fp4=6.2),
        # nvidia-smi: 189471 and 284208 MiB
        Gpu("gb200", 184 * GIB, 100, 8.0e12, 2.5e15, NVLINK, "GB200", "gb200", per_node=4, arm=True),
        Gpu("gb300", 276 * GIB, 103, 8.0e12, 2.5e15, NVLINK, "GB300", "gb300", per_node=4, arm=True, fp4=6),
        # nvidia-smi: 97887 and 32607 MiB
        Gpu("rtx-pro-6000", 95 * GIB, 120, 1.792e12, 0.468e15, PCIE_5, "RTX PRO 6000", "rtx_pro_6000_server"),
        Gpu("rtx-5090", 31 * GIB, 120, 1.792e12, 0.2095e15, PCIE_5, "RTX 5090$", fp4=8),
        Gpu("rtx-6000d", 82 * GIB, 120, 1.568e12, 0.388e15, PCIE_5, "RTX 6000D"),
        # A DGX Spark: its memory is the CPU's, too; the system and other programs take a part of it.
        Gpu("gb10", 110 * GIB, 121, 0.273e12, 0.125e15, 25e9, "GB10", per_node=1, arm=True),
    )
}


def named_by(product: str) -> Gpu | None:
    """The GPU that nvidia-smi calls by this name, such as `NVIDIA H100 80GB HBM3`; None = none that is known.

    A part of one is none: neither a vGPU (`NVIDIA H200-18C`) nor a MIG slice (`NVIDIA H200 MIG 1g.18gb`).
    """
    return next((gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.product}(?!\w|{A_PART})", product)), None)

"""How long a server may take to start, from the size of what it loads."""

from __future__ import annotations

import math

from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target_layout import read_target_layout, target_configuration
from dflash_serve.checkpoint.tensors import weight_bytes
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.errors import UserError

from .workload import Workload

BASE_SECONDS = 300
"""Compilation, graphs, warm-up."""
GIGABYTES_PER_SECOND = 0.5
"""From the hub or a slow volume."""
UNKNOWN_GIGABYTES = 64


def gigabytes(workload: Workload) -> int | None:
    """Weights of target and drafter, rounded up; None where no config.json says it (the bundled target)."""
    deployment = workload.deployment
    try:
        target = read_target_layout(target_configuration(deployment.target), deployment.target).weight_bytes
    except UserError:
        return None
    drafter = 0
    if uses_drafter(deployment) and deployment.drafter is not None:
        drafter = weight_bytes(read_config(drafter_source(deployment.drafter.model), deployment.drafter.revision)[0])
    return math.ceil((target + drafter) / 1e9)


def startup_seconds(workload: Workload) -> int:
    """After so long a container that is not ready is started again."""
    return BASE_SECONDS + math.ceil((gigabytes(workload) or UNKNOWN_GIGABYTES) / GIGABYTES_PER_SECOND)

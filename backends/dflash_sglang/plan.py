"""Plan: a Deployment, its target and its drafter, read once; what follows from them for SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.reader import Checkpoint, open_checkpoint
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target_layout import TargetLayout, read_target_layout, target_configuration
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.gpus import GPUS, Gpu

NATIVE, OURS = "DFLASH", "DFLASH_SERVE"
"""SGLang's own algorithm, and the one our plug-in registers, whose width follows the policy."""


@dataclass(frozen=True)
class Plan:
    """What is served, as far as files tell."""

    deployment: Deployment
    target: TargetLayout
    checkpoint: Checkpoint | None
    """None = no speculation."""

    @property
    def drafter(self) -> DrafterConfig | None:
        """None where there is none, or where it cannot be understood (its checkpoint's problems say why)."""
        return self.checkpoint.config if self.checkpoint else None

    @property
    def block_size(self) -> int | None:
        """B; None without speculation."""
        if self.drafter is None:
            return None
        return self.deployment.speculation.block_size or self.drafter.block_size

    @property
    def algorithm(self) -> str | None:
        """A width that never changes needs nothing of ours; None without speculation."""
        if self.drafter is None:
            return None
        return NATIVE if self.deployment.speculation.width == self.block_size or self.is_half else OURS

    @property
    def is_half(self) -> bool:
        """One half of a disaggregated pair."""
        return self.deployment.role != "whole"

    @property
    def gpu(self) -> Gpu | None:
        """None where the deployment does not name one."""
        return GPUS.get(self.deployment.hardware.gpu or "none")


def make_plan(deployment: Deployment) -> Plan:
    """Reads config.json files and safetensors headers.

    Raises:
        UserError: the target or drafter cannot be found or read at all.
    """
    checkpoint = None
    if uses_drafter(deployment):
        assert deployment.drafter is not None
        checkpoint = open_checkpoint(drafter_source(deployment.drafter.model), deployment.drafter.revision)
    target = read_target_layout(target_configuration(deployment.target), deployment.target)
    return Plan(deployment, target, checkpoint)

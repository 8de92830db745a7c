"""LaunchPlan: a Deployment, its target and its drafter, as their files describe them; what follows for SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_serve.checkpoint.config import DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.reader import Checkpoint, open_checkpoint
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, target_configuration
from dflash_serve.deployment import ENV_PREFIX, GIB, GPUS, Deployment, Gpu
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.engine_args import EngineArgs

from .heads import DFLASH, algorithm_of, verifies_whole_blocks

NATIVE = DFLASH
"""SGLang's own algorithm; where a width is asked for, our plug-in gives it another worker."""
WIDTH_VARIABLE = f"{ENV_PREFIX}SPECULATION__WIDTH"
"""The Deployment's own variable, by which the plug-in is told the width: `auto`, or a number."""
RUNTIME_BYTES = 3 * GIB
"""CUDA context, NCCL, workspaces."""
GRAPH_BYTES = 3 * GIB
"""CUDA graphs of target and drafter, and activations of a prefill."""
WIDTH_BYTES = GIB
"""Attention workspace and CUDA graphs of another width than B."""
KV_BYTES = {"auto": 2.0, "bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Of one number in the K/V cache, by `kv_cache.dtype`."""


def narrow_widths(block_size: int) -> list[int]:
    """What an automatic width chooses from besides B: 1 (off) and powers of two, few enough to have graphs each."""
    return [width for width in (1, 2, 4, 8, 16, 32) if width < block_size]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, on the safe side.

    SGLang's drafter has a K/V entry for every entry of the target (one index space): its pool grows with the target's,
    which surprised users (sglang#40665), so both are counted per token.
    """

    total: int
    target: int
    drafter: int
    token: int
    """K/V of one token, target's and drafter's."""
    widths: int = 0
    """Widths other than B that blocks are verified at."""

    @property
    def running(self) -> int:
        """What is neither weights nor K/V."""
        return RUNTIME_BYTES + GRAPH_BYTES + self.widths * WIDTH_BYTES

    @property
    def pool(self) -> int:
        """What is left for K/V; may be negative."""
        return self.total - self.target - self.drafter - self.running

    @property
    def tokens(self) -> int:
        """How many the pools hold."""
        return max(0, self.pool // self.token)

    def static_fraction(self, share: float) -> float:
        """`--mem-fraction-static`: of all memory, for weights and K/V, where K/V gets `share` of what weights leave."""
        weights = self.target + self.drafter
        return round((weights + share * (self.total - weights)) / self.total, 3)


@dataclass(frozen=True)
class LaunchPlan:
    """What is served, as far as files tell."""

    deployment: Deployment
    target: TargetLayout
    checkpoint: Checkpoint | None
    """None = no speculation."""

    @property
    def engine_args(self) -> EngineArgs:
        """The user's own arguments for SGLang."""
        return self.deployment.engine_args.get("sglang", {})

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
        """None without speculation."""
        return None if self.drafter is None else algorithm_of(self.drafter)

    @property
    def family(self) -> str:
        """What the drafter is called: DFlash, DFlash2 or DSpark."""
        return "no" if self.drafter is None else self.drafter.family

    @property
    def whole_blocks_with(self) -> str | None:
        """The part of the deployment with which SGLang verifies whole blocks only; None: any width can be verified."""
        if self.drafter is None:
            return None
        parts = {
            f"a {self.family} drafter": verifies_whole_blocks(self.drafter),
            "one half of a disaggregated pair": self.is_half,
            "recurrent layers in the target": self.target.recurrent,
            "data-parallel attention": self.deployment.parallel.attention_data,
        }
        return next((part for part, is_there in parts.items() if is_there), None)

    @property
    def width(self) -> int | str | None:
        """What our worker is asked for; None = SGLang's own whole blocks (or nothing), which need nothing of ours."""
        asked = self.deployment.speculation.width
        whole = asked == self.block_size or self.whole_blocks_with is not None
        return None if self.drafter is None or whole else asked

    @property
    def narrow_widths(self) -> list[int]:
        """Widths below B at which our worker may verify."""
        if self.width is None or self.block_size is None:
            return []
        return [self.width] if isinstance(self.width, int) else narrow_widths(self.block_size)

    @property
    def is_half(self) -> bool:
        """Whether it is one half of a disaggregated pair."""
        return self.deployment.role != "whole"

    @property
    def gpu(self) -> Gpu | None:
        """None where the deployment does not name one."""
        return GPUS.get(self.deployment.hardware.gpu or "none")

    @property
    def memory(self) -> MemoryEstimate | None:
        """The estimate for one device; None where the deployment does not name its GPU."""
        if self.gpu is None:
            return None
        parallel = self.deployment.parallel
        split = 1 if parallel.attention_data else parallel.tensor
        token = self.target.kv_bytes(KV_BYTES[self.deployment.kv_cache.dtype])
        token //= 1 if self.target.latent else min(split, self.target.kv_heads)
        drafter = 0
        if self.drafter is not None:
            drafter = weight_bytes(self.drafter) // split
            token += context_bytes(self.drafter) // min(split, self.drafter.num_key_value_heads)
        weights = self.target.weight_bytes // parallel.tensor
        return MemoryEstimate(self.gpu.memory, weights, drafter, token, len(self.narrow_widths))


def read_launch_plan(deployment: Deployment) -> LaunchPlan:
    """Reads config.json files and safetensors headers.

    Raises:
        UserError: the target or drafter cannot be found or read at all.
    """
    checkpoint = None
    if uses_drafter(deployment):
        assert deployment.drafter is not None
        checkpoint = open_checkpoint(drafter_source(deployment.drafter.model), deployment.drafter.revision)
    target = read_target_layout(target_configuration(deployment.target), deployment.target)
    return LaunchPlan(deployment, target, checkpoint)

"""`SGLangPlan`: a deployment, its target and its drafter, and the settings of SGLang that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_serve.common.settings import ENV_PREFIX
from dflash_serve.deployment import GIB
from dflash_serve.server_adapter import LaunchPlan

from .heads import DFLASH, algorithm_of, verifies_whole_blocks

NATIVE = DFLASH  # SGLang's own algorithm; where a width is asked for, our plug-in gives it another worker
WIDTH_VARIABLE = f"{ENV_PREFIX}SPECULATION__WIDTH"
"""The Deployment's own variable, by which the plug-in is told the width: `auto`, or a number."""
RUNTIME_BYTES = 3 * GIB  # CUDA context, NCCL, workspaces
GRAPH_BYTES = 3 * GIB  # CUDA graphs of target and drafter, and activations of a prefill
WIDTH_BYTES = GIB  # attention workspace and CUDA graphs of another width than B


def narrow_widths(block_size: int) -> list[int]:
    """Widths of `auto` besides B: 1 (off) and powers of two, few enough for CUDA graphs of each."""
    return [width for width in (1, 2, 4, 8, 16, 32) if width < block_size]


@dataclass(frozen=True, kw_only=True)
class SGLangPlan(LaunchPlan):
    """A launch of SGLang.

    SGLang's drafter has a K/V entry for every entry of the target (one index space): its pool grows with the target's
    (sglang#40665), so `memory` counts both per token.
    """

    @property
    def algorithm(self) -> str | None:
        """None without speculation."""
        return None if self.drafter is None else algorithm_of(self.drafter)

    @property
    def family(self) -> str:
        """Name of the drafter's kind: DFlash, DFlash2 or DSpark."""
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
        """Width that our worker is asked for; None = SGLang's own whole blocks, or no speculation."""
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
        """One half of a disaggregated pair."""
        return self.deployment.role != "whole"

    @property
    def running_bytes(self) -> int:
        """Memory of a device beside weights and K/V; every width other than B has graphs of its own."""
        return RUNTIME_BYTES + GRAPH_BYTES + len(self.narrow_widths) * WIDTH_BYTES

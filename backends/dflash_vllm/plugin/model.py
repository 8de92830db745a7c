"""vLLM's own drafters, refused where vLLM would load them wrongly and say nothing. Imported by name, by vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

from dflash_serve.errors import refuse

from .guards import draft_problems, reading_problems, tensor_problems


class _Strict:
    """Mixed into a drafter: what is wrong ends the start, with a ValueError that says it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        refuse(draft_problems(vllm_config))
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        refuse(reading_problems(self, vllm_config))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """As vLLM does, then accounts for every tensor and every parameter."""
        names: list[str] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        loaded = super().load_weights(noted())  # type: ignore[misc]
        refuse(tensor_problems(names, {name for name, _ in self.named_parameters()}))  # type: ignore[attr-defined]
        return loaded


class StrictDFlash(_Strict, DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """A plain DFlash drafter."""

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """As vLLM's, but for blocks that are the anchor alone (width 1): the V1 runner asks for them, too, so that the
        drafter's K/V stays in step, and looks at no row of what they come to. Their context is stored before.

        Returns:
            [rows, hidden_size].
        """
        if _is_anchor_alone():
            return positions.new_zeros((len(positions), self.config.hidden_size), dtype=self.lm_head.weight.dtype)
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        return hidden


class StrictDFlash2(_Strict, DFlash2Qwen3ForCausalLM):  # type: ignore[misc]
    """A DFlash2 drafter; of it only the names of tensors are checked."""


def _is_anchor_alone() -> bool:
    """Whether every request of this pass has one row; not, where that is not told (profiling, capture)."""
    metadata = get_forward_context().attn_metadata
    layers = list(metadata.values()) if isinstance(metadata, dict) else []
    return bool(layers) and all(getattr(layer, "max_query_len", None) == 1 for layer in layers)

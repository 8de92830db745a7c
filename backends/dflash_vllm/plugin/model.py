"""vLLM's own drafters, refused where vLLM would load them wrongly and say nothing. Imported by name, by vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

from dflash_serve.errors import refuse

from .backlog import MOST_ROWS, Backlog
from .guards import draft_problems, reading_problems, tensor_problems
from .resting import spare_the_worker


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
    """A plain DFlash drafter.

    At width 1 the V1 runner asks for blocks that are the anchor alone, too, so that the drafter's K/V stays in step,
    and looks at no row of what they come to: nothing of the drafter runs then. Where it may (`may_wait`), the context
    of steps that draft nothing waits in a `Backlog` until a block is drafted.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._backlog = Backlog()
        if may_wait(vllm_config):
            spare_the_worker()

    def rest(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Takes a step's context without a block: [rows, F*H], [rows], [rows]; vLLM's own memory."""
        self._backlog.add(features, positions, slots)
        if self._backlog.rows >= MOST_ROWS:
            self._store_backlog()

    def precompute_and_store_context_kv(self, states: Tensor, positions: Tensor, slots: Any = None) -> None:
        """Stores the K/V of the context that waits, then of this: [rows, H], [rows], and [rows] or None (nowhere)."""
        if self._backlog.rows:
            self._store_backlog()
        super().precompute_and_store_context_kv(states, positions, slots)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """[rows, hidden_size]."""
        if _is_anchor_alone():
            return positions.new_zeros((len(positions), self.config.hidden_size), dtype=self.lm_head.weight.dtype)
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        return hidden

    def _store_backlog(self) -> None:
        features, positions, slots = self._backlog.take()
        super().precompute_and_store_context_kv(self.combine_hidden_states(features), positions, slots)


class StrictDFlash2(_Strict, DFlash2Qwen3ForCausalLM):  # type: ignore[misc]
    """A DFlash2 drafter; of it only the names of tensors are checked."""


def may_wait(vllm_config: Any) -> bool:
    """Whether the drafter's context may be stored later: on a CPU (V1 runner, no graphs), with nobody who moves K/V."""
    return vllm_config.device_config.device_type == "cpu" and vllm_config.kv_transfer_config is None


def _is_anchor_alone() -> bool:
    """Whether every request of this pass has one row; not, where that is not told (profiling, capture)."""
    metadata = get_forward_context().attn_metadata
    layers = list(metadata.values()) if isinstance(metadata, dict) else []
    return bool(layers) and all(getattr(layer, "max_query_len", None) == 1 for layer in layers)

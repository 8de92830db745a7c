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
    and looks at no row of what they come to: nothing of the drafter runs then. Its context waits in a `Backlog` until
    a block is drafted, where it may (`may_wait`); elsewhere it is stored at every step, as vLLM does.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._backlog = Backlog() if may_wait(vllm_config) else None
        self._features: Tensor | None = None

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """[rows, F*H] -> [rows, H]; numbers that nobody reads where the rows may wait."""
        if self._backlog is None:
            combined: Tensor = super().combine_hidden_states(hidden_states)
            return combined
        self._features = hidden_states
        return hidden_states.new_empty((len(hidden_states), self.config.hidden_size))

    def precompute_and_store_context_kv(self, states: Tensor, positions: Tensor, slots: Any = None) -> None:
        """Stores the context's K/V, or lets it wait.

        Args:
            states: what `combine_hidden_states` returned, [rows, H], or a dummy.
            slots: [rows], -1 for rows that are thrown away; None = nothing is stored.
        """
        features, self._features = self._features, None
        if self._backlog is None or features is None or not isinstance(slots, Tensor):
            super().precompute_and_store_context_kv(states, positions, slots)
            return
        self._backlog.add(features, positions, slots)
        if self._backlog.rows >= MOST_ROWS:
            self._store_backlog(self._backlog)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """[rows, hidden_size]."""
        if _is_anchor_alone():
            return positions.new_zeros((len(positions), self.config.hidden_size), dtype=self.lm_head.weight.dtype)
        if self._backlog is not None and self._backlog.rows:
            self._store_backlog(self._backlog)
        hidden: Tensor = super().forward(input_ids, positions, inputs_embeds)
        return hidden

    def _store_backlog(self, backlog: Backlog) -> None:
        features, positions, slots = backlog.take()
        super().precompute_and_store_context_kv(super().combine_hidden_states(features), positions, slots)


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

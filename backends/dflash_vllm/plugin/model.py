"""vLLM's own drafter classes, which refuse what vLLM would silently load wrongly. vLLM imports them by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

from dflash_serve.errors import refuse

from .guards import draft_problems, reading_problems, tensor_problems


class _Strict:
    """Mixed into a drafter class.

    Raises:
        ValueError: the drafter has a problem; the message says which.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        refuse(draft_problems(vllm_config))
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        refuse(reading_problems(self, vllm_config))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Loads the weights, then accounts for every tensor and every parameter."""
        names: list[str] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        loaded = super().load_weights(noted())  # type: ignore[misc]
        refuse(tensor_problems(names, {name for name, _ in self.named_parameters()}))  # type: ignore[attr-defined]
        return loaded


class StrictDFlash(_Strict, DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """A plain DFlash drafter: its files, its tensors, and the layers that vLLM built are checked."""


class StrictDFlash2(_Strict, DFlash2Qwen3ForCausalLM):  # type: ignore[misc]
    """A DFlash2 drafter: only the names of its tensors are checked."""

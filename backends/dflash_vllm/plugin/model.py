"""vLLM's own drafter classes, which refuse what vLLM would silently load wrongly. vLLM imports them by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

from dflash_serve.checkpoint.loading import given_checkpoint
from dflash_serve.errors import refuse

from .guards import draft_problems, loader_of, reading_problems


class _Strict:
    """Mixed into a drafter class.

    Raises:
        ValueError: the drafter has a problem; the message says which.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        draft = vllm_config.speculative_config.draft_model_config
        checkpoint = given_checkpoint(draft.model, draft.revision)
        refuse(draft_problems(vllm_config, checkpoint))
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        refuse(reading_problems(self, checkpoint))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Loads the weights, then accounts for every tensor and every parameter."""
        renamed = ((name.replace("midlayer.", "layers.0."), tensor) for name, tensor in weights)
        return loader_of(self).load(super().load_weights, self, renamed)[0]  # type: ignore[misc]


class StrictDFlash(_Strict, DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """A plain DFlash drafter: its files, its tensors, and the layers that vLLM built are checked."""


class StrictDFlash2(_Strict, DFlash2Qwen3ForCausalLM):  # type: ignore[misc]
    """A DFlash2 drafter: only the names of its tensors are checked."""

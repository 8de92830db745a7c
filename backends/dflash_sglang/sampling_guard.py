"""A loud error for sampled requests where SGLang could only verify greedily.

Where its sampling kernel is absent SGLang logs one warning and answers every request as if at temperature 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import upstream

MESSAGE = (
    "dflash-serve: this SGLang build cannot verify sampled tokens of DFlash drafts (its kernel is absent), and would "
    "answer greedily without saying so; send temperature 0, or serve without speculation"
)


def guard_sampling() -> None:
    """Refuses sampled requests from now on, where they would not be answered as asked."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    if not is_dflash_sampling_verify_available():
        HookRegistry.register(upstream.TOKENIZED, refuse_sampled, HookType.AROUND)
        HookRegistry.apply_hooks()


def refuse_sampled(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the making of a request; SGLang answers a ValueError with HTTP 400.

    Raises:
        ValueError: the request is not greedy (SGLang has made top_k 1 of temperature 0 by then).
    """
    request = create(*args, **kwargs)
    params = getattr(request, "sampling_params", None)
    if params is not None and params.top_k != 1:
        raise ValueError(MESSAGE)
    return request

"""A loud error for requests that SGLang would answer otherwise with DFlash than without, and not say so.

* Penalties: SGLang counts a request's output for its penalties only in plain decoding steps
  (`schedule_batch.prepare_for_decode`) and adds one penalty to all rows of a block
  (`dflash_utils.apply_dflash_verify_logits_adjustments`), so even a step that accepts nothing is penalised wrongly.
* Sampling: where its kernel is absent SGLang logs one warning and answers every request as if at temperature 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_serve.checkpoint.target_layout import PENALTIES

from . import upstream

NEUTRAL = {**PENALTIES, "min_new_tokens": 0}
"""Sampling parameters that depend on what has been generated, and the values at which they do nothing."""
PENALISED = (
    "dflash-serve: SGLang does not count the tokens of DFlash steps for {names}, so the answer would not be the one "
    "without speculation; leave it out (where the model's generation_config.json sets it, start the server with "
    "--sampling-defaults openai), or serve without speculation"
)
SAMPLED = (
    "dflash-serve: this SGLang build cannot verify sampled tokens of DFlash drafts (its kernel is absent), and would "
    "answer greedily without saying so; send temperature 0, or serve without speculation"
)


def guard_requests() -> None:
    """Refuses such requests from now on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    can_sample = is_dflash_sampling_verify_available()

    def checked(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = create(*args, **kwargs)
        reason = refusal(getattr(request, "sampling_params", None), can_sample=can_sample)
        if reason:
            raise ValueError(reason)  # SGLang answers it with HTTP 400
        return request

    HookRegistry.register(upstream.TOKENIZED, checked, HookType.AROUND)
    HookRegistry.apply_hooks()


def refusal(params: Any, *, can_sample: bool) -> str | None:
    """Why a request with these sampling parameters (SGLang's, normalised; None: not a generation) is refused."""
    if params is None:
        return None
    names = [name for name, neutral in NEUTRAL.items() if getattr(params, name) != neutral]
    if names:
        return PENALISED.format(names=", ".join(names))
    greedy = params.top_k == 1  # SGLang has made that of temperature 0 by then
    return None if greedy or can_sample else SAMPLED

"""Requests that SGLang would silently answer wrongly are refused in the scheduler's process.

* Penalties: SGLang counts a request's output for its penalties only in plain decoding steps
  (`schedule_batch.prepare_for_decode`), so its own DFlash worker ignores them. Our worker counts them (`penalties`).
* Sampling: without the sampling kernel SGLang logs one warning and answers every request as if at temperature 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_serve.checkpoint.target import PENALTIES

NEUTRAL = {**PENALTIES, "min_new_tokens": 0}
"""Sampling parameters that depend on the generated tokens, and their neutral values."""
PENALISED = (
    "dflash-serve: SGLang does not count the tokens of DFlash steps for {names}, so the answer would not be the one "
    "without speculation; leave it out (where the model's generation_config.json sets it, start the server with "
    "--sampling-defaults openai), or serve with an automatic width, or without speculation"
)
SAMPLED = (
    "dflash-serve: this SGLang build cannot verify sampled tokens of DFlash drafts (its kernel is absent), and would "
    "answer greedily without saying so; send temperature 0, or serve without speculation"
)


def penalties_of(params: Any) -> list[str]:
    """Names of the parameters that depend on the generated tokens and are not neutral."""
    return [name for name, neutral in NEUTRAL.items() if getattr(params, name) != neutral]


def refusal(params: Any, *, can_sample: bool, counts_penalties: bool) -> str | None:
    """The reason to refuse a request with these sampling parameters (SGLang's, normalised); None: it is answered."""
    names = penalties_of(params)
    if names and not counts_penalties:
        return PENALISED.format(names=", ".join(names))
    greedy = params.top_k == 1  # SGLang has made that of temperature 0 by then
    return None if greedy or can_sample else SAMPLED


def guarded(add: Callable[..., Any], scheduler: Any, req: Any, is_retracted: bool = False) -> Any:
    """Around `Scheduler._add_request_to_queue`: a refused request is answered with HTTP 400."""
    worker = scheduler.draft_worker
    if worker is not None and not is_retracted and req.to_finish is None:
        from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

        counts = bool(getattr(worker, "counts_penalties", False))
        reason = refusal(req.sampling_params, can_sample=is_dflash_sampling_verify_available(), counts_penalties=counts)
        if reason is not None:
            req.set_finish_with_abort(reason)
    return add(scheduler, req, is_retracted)

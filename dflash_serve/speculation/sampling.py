"""From the target's logits to what it would sample from: for whole blocks of many requests at once.

The order is vLLM's (`vllm/v1/sample/sampler.py`): logit bias, then repetition, frequency and presence penalties, on
raw logits; temperature; min_p; top_k; top_p over what top_k left. Hugging Face applies penalties before temperature as
well, but min_p after top_p; where all are on, the two libraries differ.
"""

import torch
from torch import Tensor

from dflash_serve.speculation.batch import SamplingBatch
from dflash_serve.speculation.penalties import TokenCounts, apply_penalties
from dflash_serve.speculation.truncation import keep_min_p, keep_top_k, keep_top_p


def adjust_logits(
    logits: Tensor, batch: SamplingBatch, counts: TokenCounts | None = None, draft: Tensor | None = None
) -> Tensor:
    """Apply what may move the most probable token: logit bias and penalties.

    Args:
        logits: [N, W, V] floating; row j follows slot j of the block. Left untouched.
        batch: parameters of the N requests.
        counts: tokens seen so far; needed when a request has a penalty.
        draft: [N, W-1] int64, slots 1..W-1, -1 pads; needed when a request has a penalty and W > 1.

    Returns:
        [N, W, V] float32, or `logits` itself when nothing is switched on.

    Raises:
        ValueError: a request has a penalty but `counts` or `draft` is missing.
    """
    if batch.bias_token.shape[0]:
        logits = logits.to(torch.float32, copy=True)
        logits[batch.bias_request, :, batch.bias_token] += batch.bias_value[:, None]
    if not batch.penalised:
        return logits
    if counts is None or (draft is None and logits.shape[1] > 1):
        raise ValueError("a request has a penalty: pass `counts`, and `draft` for blocks of more than one row")
    if draft is None:
        draft = torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    return apply_penalties(logits.float(), batch, counts, draft)


def greedy_tokens(
    logits: Tensor, batch: SamplingBatch, counts: TokenCounts | None = None, draft: Tensor | None = None
) -> Tensor:
    """The target's most probable token in every row, [N, W] int64: one argmax when nothing is switched on.

    Args and Raises: as for `adjust_logits`.
    """
    return adjust_logits(logits, batch, counts, draft).argmax(-1)


def probabilities(
    logits: Tensor, batch: SamplingBatch, counts: TokenCounts | None = None, draft: Tensor | None = None
) -> Tensor:
    """The distribution that each row is sampled from.

    A greedy request (temperature 0) gets all mass on its most probable token, so a mixed batch needs one path only:
    sampling and acceptance then do exactly what the greedy rules would.

    Args and Raises: as for `adjust_logits`.

    Returns:
        [N, W, V] float32; each row sums to 1.
    """
    adjusted = adjust_logits(logits, batch, counts, draft).float()
    if batch.all_greedy:
        return _all_mass_on_best(adjusted)
    scaled = adjusted / torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None, None]
    result = _truncate(scaled, batch).softmax(-1)
    greedy = batch.greedy_requests
    if greedy.shape[0]:
        result[greedy] = _all_mass_on_best(adjusted[greedy])
    return result


def _truncate(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """min_p, top_k, top_p, in place, each for the requests that want it."""
    if (some := batch.min_p_requests).shape[0]:
        scaled[some] = keep_min_p(scaled[some], batch.min_p[some])
    if (some := batch.top_k_requests).shape[0]:
        scaled[some] = keep_top_k(scaled[some], batch.top_k[some], batch.largest_top_k)
    if (some := batch.top_p_requests).shape[0]:
        scaled[some] = keep_top_p(scaled[some], batch.top_p[some])
    return scaled


def _all_mass_on_best(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)

"""min_p, top_k, top_p: which tokens may be sampled at all. The others get a logit of -inf."""

from typing import Final

from torch import Tensor

NEVER: Final = float("-inf")
_USUAL_NUCLEUS: Final = 1024


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens of at least min_p times the highest probability: logit >= highest + log(min_p).

    logits [N, W, V] float, min_p [N] in [0, 1] (0 keeps all); returns [N, W, V].
    """
    lowest = logits.amax(-1, keepdim=True) + min_p.log()[:, None, None]
    return logits.masked_fill(logits < lowest, NEVER)


def keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Keep the top_k highest logits and what equals the last of them.

    logits [N, W, V] float, top_k [N] int64 in 1..largest, largest <= V; returns [N, W, V].
    """
    highest = logits.topk(largest, dim=-1).values
    last = (top_k - 1)[:, None, None].expand(-1, logits.shape[1], 1)
    return logits.masked_fill(logits < highest.gather(-1, last), NEVER)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest tokens, most probable first, whose probabilities together reach top_p.

    A token stays if the more probable ones sum to less than top_p: the most probable always does, and equals stay or go
    together, so that no order of sorting matters. A nucleus seldom has many tokens: the most probable ones are looked
    at first, and the whole vocabulary is sorted only if they do not reach top_p in some row.

    logits [N, W, V] float, top_p [N] in (0, 1]; returns [N, W, V].
    """
    total, needed = logits.logsumexp(-1, keepdim=True), top_p[:, None, None]
    highest = logits.topk(min(_USUAL_NUCLEUS, logits.shape[-1]), dim=-1).values
    mass = (highest - total).exp().cumsum(-1)
    if highest.shape[-1] < logits.shape[-1] and bool((mass[..., -1:] < needed).any()):
        highest = logits.sort(dim=-1, descending=True).values
        mass = (highest - total).exp().cumsum(-1)
    kept = (mass - (highest - total).exp() < needed).sum(-1, keepdim=True).clamp(min=1)
    return logits.masked_fill(logits < highest.gather(-1, kept - 1), NEVER)

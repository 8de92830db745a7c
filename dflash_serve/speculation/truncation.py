"""min_p, top_k, top_p: which tokens may be sampled at all. The others get a logit of -inf."""

from torch import Tensor

NEVER = float("-inf")


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

    A token stays if the more probable ones sum to less than top_p: the first always does. Among equals the lower token
    id comes first (a stable sort), so that the choice does not depend on the shape of the batch.

    logits [N, W, V] float, top_p [N] in (0, 1]; returns [N, W, V].
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = before >= top_p[:, None, None]
    dropped[..., 0] = False
    return logits.masked_fill(dropped.new_empty(dropped.shape).scatter_(-1, order, dropped), NEVER)

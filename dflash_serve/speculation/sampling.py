"""The distribution that the target samples from, for whole blocks of many requests (`SamplingBatch`) at once.

The order is vLLM's (`vllm/v1/sample/sampler.py`): logit bias, then repetition, frequency and presence penalties, on
raw logits; temperature; min_p; top_k; top_p over the tokens that top_k left. Hugging Face also applies penalties before
temperature, but min_p after top_p; with both on, the two libraries differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_serve.speculation.params import SamplingParams

NEVER: Final = float("-inf")
_USUAL_NUCLEUS: Final = 1024


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of N requests. Build it with `of`, anew whenever the batch changes, not at every step.

    The `*_requests` hold the indices of the requests that use an option: an unused option costs nothing, an option of
    one request costs the others nothing, and no step waits for the device to look them up.

    Shapes: temperature, top_p, top_k, min_p and the penalties [N]; bias_* [M], one entry per (request, token).
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    bias_request: Tensor
    bias_token: Tensor
    bias_value: Tensor
    greedy_requests: Tensor
    top_p_requests: Tensor
    top_k_requests: Tensor
    min_p_requests: Tensor
    largest_top_k: int
    penalised: bool

    @property
    def size(self) -> int:
        return self.temperature.shape[0]

    @property
    def all_greedy(self) -> bool:
        return self.greedy_requests.shape[0] == self.size

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str | None = None
    ) -> SamplingBatch:
        """Collate the parameters of N requests; their biases name tokens of the vocabulary."""
        bias = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
        on_gpu = torch.device(device or "cpu").type == "cuda"  # which the host would wait for without pinned memory

        def floats(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=True)

        def ints(values: Sequence[int]) -> Tensor:
            return floats(values, torch.int64)

        def where(wanted: Callable[[SamplingParams], bool]) -> Tensor:
            return ints([i for i, p in enumerate(params) if wanted(p)])

        return cls(
            temperature=floats([p.temperature for p in params]),
            top_p=floats([p.top_p for p in params]),
            top_k=ints([min(p.top_k, vocab_size) for p in params]),
            min_p=floats([p.min_p for p in params]),
            repetition_penalty=floats([p.repetition_penalty for p in params]),
            presence_penalty=floats([p.presence_penalty for p in params]),
            frequency_penalty=floats([p.frequency_penalty for p in params]),
            bias_request=ints([request for request, _, _ in bias]),
            bias_token=ints([token for _, token, _ in bias]),
            bias_value=floats([value for _, _, value in bias]),
            greedy_requests=where(lambda p: p.greedy),
            top_p_requests=where(lambda p: p.top_p < 1 and not p.greedy),
            top_k_requests=where(lambda p: p.top_k > 0 and not p.greedy),
            min_p_requests=where(lambda p: p.min_p > 0 and not p.greedy),
            largest_top_k=max((min(p.top_k, vocab_size) for p in params if not p.greedy), default=0),
            penalised=any(p.penalised for p in params),
        )


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

    A token is kept if the more probable ones sum to less than top_p. So the most probable token is always kept, and
    equally probable tokens are kept or dropped together, in any order of sorting. A nucleus seldom has many tokens: the
    whole vocabulary is sorted only if the `_USUAL_NUCLEUS` most probable tokens do not reach top_p in some row.

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


@dataclass(frozen=True)
class TokenCounts:
    """Counts of the tokens that each request has seen so far.

    in_prompt: [N, V] bool. in_output: [N, V] int32, the committed output tokens, the anchor among them.
    """

    in_prompt: Tensor
    in_output: Tensor

    @classmethod
    def of(cls, prompts: Tensor, outputs: Tensor, vocab_size: int) -> TokenCounts:
        """Counts the tokens of N prompts and outputs, int64 [N, any length] each; -1 pads."""

        def count(tokens: Tensor) -> Tensor:
            none = torch.zeros(len(tokens), vocab_size, dtype=torch.int32, device=tokens.device)
            return none.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).int())

        return cls(count(prompts) > 0, count(outputs))


def apply_penalties(logits: Tensor, batch: SamplingBatch, counts: TokenCounts, draft: Tensor) -> Tensor:
    """Penalise every row of a block as if its tokens had been generated one by one.

    Row j follows slots 1..j of the block, so its output counts are the committed ones plus those of these slots. Only
    tokens drafted in the block can differ from the committed counts, and there are at most W-1 of them. So all rows are
    penalised with the committed counts; then in each row the logits of the block's tokens are computed again, from
    the unchanged logits and the row's own counts. No [N, W, V] counts are made.

    Args:
        logits: [N, W, V] float32, logit bias applied; left untouched.
        batch: the strengths, [N] each.
        counts: of committed tokens, with slot 0, the anchor.
        draft: [N, W-1] int64, slots 1..W-1; -1 pads.

    Returns:
        [N, W, V] float32.
    """
    prompt, output = counts.in_prompt, counts.in_output
    penalised = _penalise(logits, batch, prompt[:, None], output[:, None])
    if draft.shape[1] == 0:
        return penalised
    tokens = draft.clamp(min=0)
    index = tokens[:, None].expand(-1, logits.shape[1], -1)  # [N, W, W-1]: row, token of slot i
    row_counts = output.gather(1, tokens)[:, None] + _occurrences(tokens, logits.shape[1])
    again = _penalise(logits.gather(2, index), batch, prompt.gather(1, tokens)[:, None], row_counts)
    return penalised.scatter_(2, index, again)  # a token drafted twice is written twice, with the same value


def _occurrences(tokens: Tensor, rows: int) -> Tensor:
    """[N, W, W-1] int32: occurrences of slot i's token among slots 1..j (row j, 0-based; row 0 has none)."""
    same = (tokens[:, :, None] == tokens[:, None, :]).int()  # [N, i, m]
    counted = same.cumsum(2, dtype=torch.int32).transpose(1, 2)  # [N, m, i]: among slots 1..m
    none = counted.new_zeros(counted.shape[0], 1, counted.shape[2])
    return torch.cat([none, counted], dim=1)[:, :rows]


def _penalise(logits: Tensor, batch: SamplingBatch, in_prompt: Tensor, in_output: Tensor) -> Tensor:
    """Repetition (scales), then frequency and presence (subtract). A neutral strength changes no bit.

    logits [N, W, X]; in_prompt and in_output broadcast to it ([N, 1 or W, X]).
    """
    present = in_output > 0
    scale = torch.where(in_prompt | present, batch.repetition_penalty[:, None, None], 1.0)
    scaled = torch.where(logits > 0, logits / scale, logits * scale)
    frequency, presence = batch.frequency_penalty[:, None, None], batch.presence_penalty[:, None, None]
    return scaled - (frequency * in_output + presence * present)


def adjust_logits(
    logits: Tensor, batch: SamplingBatch, counts: TokenCounts | None = None, draft: Tensor | None = None
) -> Tensor:
    """Apply logit bias and penalties, which may change the most probable token.

    Args:
        logits: [N, W, V] floating; row j follows slot j of the block. Not changed.
        batch: parameters of the N requests.
        counts: tokens seen so far; needed when a request has a penalty.
        draft: [N, W-1] int64, slots 1..W-1, -1 pads; needed when a request has a penalty.

    Returns:
        [N, W, V] float32, or `logits` itself when nothing is switched on.
    """
    if batch.bias_token.shape[0]:
        logits = logits.to(torch.float32, copy=True)
        logits[batch.bias_request, :, batch.bias_token] += batch.bias_value[:, None]
    if not batch.penalised:
        return logits
    assert counts is not None
    assert draft is not None
    return apply_penalties(logits.float(), batch, counts, draft)


def greedy_tokens(
    logits: Tensor, batch: SamplingBatch, counts: TokenCounts | None = None, draft: Tensor | None = None
) -> Tensor:
    """The target's most probable token in every row, [N, W] int64; a single argmax without bias and penalties.

    Args: as for `adjust_logits`.
    """
    return adjust_logits(logits, batch, counts, draft).argmax(-1)


def probabilities(
    logits: Tensor, batch: SamplingBatch, counts: TokenCounts | None = None, draft: Tensor | None = None
) -> Tensor:
    """The distribution that each row is sampled from.

    A greedy request (temperature 0) has all mass on its most probable token. So a mixed batch needs one path only, and
    sampling and acceptance give the greedy result for that request.

    Args: as for `adjust_logits`.

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
    # min_p, top_k, top_p, in place, each for the requests that set it.
    if (some := batch.min_p_requests).shape[0]:
        scaled[some] = keep_min_p(scaled[some], batch.min_p[some])
    if (some := batch.top_k_requests).shape[0]:
        scaled[some] = keep_top_k(scaled[some], batch.top_k[some], batch.largest_top_k)
    if (some := batch.top_p_requests).shape[0]:
        scaled[some] = keep_top_p(scaled[some], batch.top_p[some])
    return scaled


def _all_mass_on_best(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)

"""The tokens that each request gains from the target's logits of a ragged batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_serve.answers.engine import TokenLogprob
from dflash_serve.models.kv_cache import to_device
from dflash_serve.speculation.acceptance import accept_matching, accept_sampled
from dflash_serve.speculation.noise import draw, uniforms
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.sampling import SamplingBatch, TokenCounts, greedy_tokens, probabilities

from .model_runner import Fetched
from .request import Request

log = logging.getLogger(__name__)
# Marks a slot behind the bonus token (`accept_matching`).
UNUSED = -1
# Marks a slot where the target's logits are NaN or infinite.
BROKEN = -2
NOT_FINITE = "the target's logits are NaN or infinite"


@dataclass(frozen=True)
class StepResult:
    """Tokens that one step brought one request, and a logprob for each if requested."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None

    def first(self, count: int) -> StepResult:
        """The first `count` tokens of the result."""
        return StepResult(self.request, self.token_ids[:count], self.logprobs and self.logprobs[:count])


class Sampler:
    """Samples a step's tokens. It keeps the collated parameters of the last batch, which mostly are the next one's."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []
        self._batch: SamplingBatch | None = None

    def choose(self, requests: Sequence[Request], logits: Tensor, seeds: Tensor, first: Tensor) -> Tensor:
        """The target's own token in every row, int64 [N, W]; BROKEN where logits are not finite. It does not wait.

        Args:
            requests: unconstrained ones (`Request.unconstrained`).
            logits: [N, W, V].
            seeds, first: int64 [N], the requests' seeds and the tokens of their answers so far.
        """
        highest, tokens = logits.max(-1)
        if not all(request.params.greedy for request in requests):
            batch = self._collated([request.params for request in requests], logits)
            tokens = draw(probabilities(logits, batch), uniforms(seeds, first, logits.shape[1]))
        return tokens.masked_fill(~highest.isfinite(), BROKEN)

    def __call__(
        self, requests: Sequence[Request], drafts: Sequence[list[int]], logits: Tensor, eos_token_ids: Sequence[int]
    ) -> Callable[[], list[StepResult]]:
        """Chooses the tokens that each request gains: its accepted drafted tokens and the bonus token.

        The function that is returned waits for them.

        Args:
            drafts: `width - 1` drafted tokens of each request.
            logits: [rows, V], `width` rows for each request in turn.
            eos_token_ids: tokens that no answer may have before its `min_tokens`.
        """
        if all(request.unconstrained and request.params.greedy for request in requests):
            return _take_the_likeliest(requests, drafts, logits)
        batch = self._collated([request.params for request in requests], logits)
        return _sample(batch, requests, drafts, logits, eos_token_ids)

    def _collated(self, params: list[SamplingParams], logits: Tensor) -> SamplingBatch:
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if self._batch is None or not same:
            self._params, self._batch = params, SamplingBatch.of(params, logits.shape[-1], logits.device)
        return self._batch


def _sample(
    batch: SamplingBatch,
    requests: Sequence[Request],
    drafts: Sequence[list[int]],
    logits: Tensor,
    eos_token_ids: Sequence[int],
) -> Callable[[], list[StepResult]]:
    device = logits.device
    widths = [1 + len(draft) for draft in drafts]
    padded_draft = _padded(drafts, device)
    raw = logits[None] if len(widths) == 1 else pad_sequence(logits.split(widths), batch_first=True)
    padded = _allowed(requests, drafts, raw, eos_token_ids)
    counts: TokenCounts | None = None
    if batch.penalised:
        prompts = [request.token_ids[: request.prompt_length] for request in requests]
        answers = [request.output_ids for request in requests]
        counts = TokenCounts.of(_padded(prompts, device), _padded(answers, device), logits.shape[-1])
    width_tensor = to_device(widths, device)
    if batch.all_greedy:
        gained = accept_matching(padded_draft, greedy_tokens(padded, batch, counts, padded_draft), width_tensor)
    else:
        known = to_device([[request.seed, len(request.output_ids)] for request in requests], device)
        p = probabilities(padded, batch, counts, padded_draft)
        numbers = uniforms(known[:, 0], known[:, 1], padded.shape[1])
        gained = accept_sampled(padded_draft, p, width_tensor, numbers)
    fetched = Fetched(torch.where((gained == UNUSED) | raw.amax(-1).isfinite(), gained, BROKEN))

    def results() -> list[StepResult]:
        found = [[token for token in tokens if token != UNUSED] for tokens in fetched.tolist()]
        return [result_of(*each) for each in zip(requests, found, raw, strict=True)]

    return results


def result_of(request: Request, tokens: list[int], rows: Tensor | None = None) -> StepResult:
    """The step's result of one request, which fails if a token could not be chosen.

    Args:
        rows: [W, V], its raw logits; needed where logprobs are asked for.
    """
    if BROKEN in tokens:
        request.failure, tokens = NOT_FINITE, []
        log.error("%s: a request ends with an error", NOT_FINITE)
    return StepResult(request, tokens, _logprobs(rows, tokens, request.params.logprobs))


def _take_the_likeliest(
    requests: Sequence[Request], drafts: Sequence[list[int]], logits: Tensor
) -> Callable[[], list[StepResult]]:
    values, likeliest = logits.max(-1)  # argmax takes 4 times as long in bfloat16 on a CPU
    fetched = Fetched(torch.where(values.isfinite(), likeliest, BROKEN))

    def results() -> list[StepResult]:
        best, first, found = fetched.tolist(), 0, list[StepResult]()
        for request, draft in zip(requests, drafts, strict=True):
            chosen, rows = best[first : first + 1 + len(draft)], logits[first : first + 1 + len(draft)]
            accepted = next((slot for slot, token in enumerate(draft) if token != chosen[slot]), len(draft))
            found.append(result_of(request, chosen[: accepted + 1], rows))
            first += len(chosen)
        return found

    return results


def _logprobs(rows: Tensor | None, tokens: list[int], top: int | None) -> list[TokenLogprob] | None:
    if top is None or rows is None:
        return None
    # rows [W, V]; exact under speculation, since row j decided token j
    logprobs = rows[: len(tokens)].float().log_softmax(-1)
    chosen = logprobs.gather(-1, to_device(tokens, rows.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(top, dim=-1)
    tops = [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens, chosen, map(tuple, tops), strict=True)]


def _allowed(
    requests: Sequence[Request], drafts: Sequence[list[int]], logits: Tensor, eos_token_ids: Sequence[int]
) -> Tensor:  # logits [N, W, V] with -inf where a grammar or `min_tokens` forbids a token
    early = [max(0, request.params.min_tokens - len(request.output_ids)) for request in requests]
    if not any(early) and all(request.grammar is None for request in requests):
        return logits
    logits = logits.clone()
    for rows, request, draft, count in zip(logits, requests, drafts, early, strict=True):
        if request.grammar is not None:
            allowed = request.grammar.masks(draft, logits.device)
            rows[: len(allowed)].masked_fill_(~allowed, float("-inf"))
        if count:
            ends = [token for token in (*eos_token_ids, *request.params.stop_token_ids) if token < rows.shape[-1]]
            rows[:count, ends] = float("-inf")
    return logits


def _padded(rows: Sequence[list[int]], device: torch.device) -> Tensor:  # int64 [N, longest]
    longest = max(map(len, rows))
    return to_device([[*row, *[UNUSED] * (longest - len(row))] for row in rows], device)


def last_rows(pending: list[list[int]], drafts: list[list[int]], heads: list[int]) -> list[int] | None:
    """Rows of the flat batch whose logits are needed: the anchor and drafted slots of each head. None = all rows."""
    rows: list[int] = []
    first = 0
    for index, (prompt, draft) in enumerate(zip(pending, drafts, strict=True)):
        end = first + len(prompt) + len(draft)
        if index in heads:
            rows += range(end - len(draft) - 1, end)
        first = end
    return None if len(rows) == first else rows

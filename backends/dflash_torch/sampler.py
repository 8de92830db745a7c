"""The target's own tokens, from its logits, and the number of drafted tokens that equal them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_serve.models.kv_cache import to_device
from dflash_serve.speculation.acceptance import count_accepted
from dflash_serve.speculation.noise import draw, uniforms
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.sampling import SamplingBatch, TokenCounts, greedy_tokens, probabilities

from .request import BROKEN, Request

# Pads rows of token ids.
UNUSED = -1


def likeliest(logits: Tensor) -> Tensor:
    """The most probable token in every row of logits [..., V]; BROKEN where they are not finite."""
    highest, tokens = logits.max(-1)  # argmax takes 4 times as long in bfloat16 on a CPU
    return tokens.masked_fill(~highest.isfinite(), BROKEN)


class Sampler:
    """Chooses a step's tokens. It keeps the collated parameters of the last batch, which mostly are the next one's."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []
        self._batch: SamplingBatch | None = None

    def __call__(
        self, requests: Sequence[Request], drafts: Sequence[list[int]], logits: Tensor, eos_token_ids: Sequence[int]
    ) -> Tensor:
        """The target's own tokens and the number of accepted drafts, int64 [N, W + 1], as `LaunchedStep.gained` reads.

        Args:
            drafts: `width - 1` drafted tokens of each request.
            logits: [rows, V], `width` rows for each request in turn.
            eos_token_ids: tokens that no answer may have before its `min_tokens`.
        """
        device, counts = logits.device, [len(draft) for draft in drafts]
        draft, most = _padded(drafts, device), to_device(counts, device)
        if all(request.unconstrained and request.params.greedy for request in requests):
            tokens = _by_request(likeliest(logits), counts)
        else:
            raw = _by_request(logits, counts)
            known = to_device([[request.seed, len(request.output_ids)] for request in requests], device)
            allowed = _allowed(requests, drafts, raw, eos_token_ids)
            tokens = self.own_tokens(requests, allowed, draft, known[:, 0], known[:, 1])
            tokens = tokens.masked_fill(~raw.amax(-1).isfinite(), BROKEN)
        return torch.cat([tokens, count_accepted(draft, tokens, most)[:, None]], dim=1)

    def own_tokens(
        self, requests: Sequence[Request], logits: Tensor, draft: Tensor, seeds: Tensor, first: Tensor
    ) -> Tensor:
        """The target's own token in every row, int64 [N, W]. Only `top_p` may wait for the device.

        Args:
            logits: [N, W, V], with -inf for tokens that are not allowed.
            draft: int64 [N, W - 1], -1 pads.
            seeds, first: int64 [N], the requests' seeds and the tokens of their answers so far.
        """
        batch, counts = self._collated([request.params for request in requests], logits), None
        if batch.penalised:
            prompts = [request.token_ids[: request.prompt_length] for request in requests]
            answers = [request.output_ids for request in requests]
            device = logits.device
            counts = TokenCounts.of(_padded(prompts, device), _padded(answers, device), logits.shape[-1])
        if batch.all_greedy:
            return greedy_tokens(logits, batch, counts, draft)
        return draw(probabilities(logits, batch, counts, draft), uniforms(seeds, first, logits.shape[1]))

    def _collated(self, params: list[SamplingParams], logits: Tensor) -> SamplingBatch:
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if self._batch is None or not same:
            self._params, self._batch = params, SamplingBatch.of(params, logits.shape[-1], logits.device)
        return self._batch


def _by_request(rows: Tensor, counts: Sequence[int]) -> Tensor:  # [rows, ...] with 1 + count for each -> [N, W, ...]
    if min(counts) == max(counts):
        return rows.view(len(counts), 1 + counts[0], *rows.shape[1:])
    return pad_sequence(rows.split([1 + count for count in counts]), batch_first=True)


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

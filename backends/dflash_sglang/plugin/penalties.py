"""Penalties under speculation: every token of an answer is counted, in order, as a plain decoding loop does.

SGLang counts nothing in speculative steps, and adds one penalty to all rows of a block. Here the row of slot j is
penalised by everything up to the block's token j, and what a step gains is counted when it has gained it. Counts live
on the device, by request, and never wait for the host: with overlapped scheduling the host is a step behind.

Shapes: n requests in a batch, p of them penalised, w slots verified, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .refusals import penalties_of


@dataclass
class _Counted:
    """One request's output so far, up to and without its anchor."""

    counts: torch.Tensor  # [V]: how often each token was put out
    knobs: torch.Tensor  # [4]: frequency_penalty, presence_penalty, repetition_penalty, min_new_tokens
    stops: torch.Tensor  # [V], 0 or -inf: what may not come before min_new_tokens


class Penalties:
    """The counts of all penalised requests that run."""

    def __init__(self, vocab_size: int, device: Any) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._counted: dict[str, _Counted] = {}

    def concern(self, requests: Sequence[Any]) -> bool:
        """True if one of the requests is penalised."""
        return bool(self._counted) and any(str(request.rid) in self._counted for request in requests)

    def at_prefill(self, batch: Any) -> None:
        """Counts what a request has put out before its prefill (after a retraction), and penalises its next token.

        Requests that decode in a mixed batch put their anchors through the target: these count from now on.
        """
        decoding = len(batch.decoding_reqs or ())
        first = len(batch.reqs) - decoding
        for i, request in enumerate(batch.reqs):
            if not penalties_of(request.sampling_params):
                continue
            known = self._counted.get(str(request.rid))
            if i >= first and known is not None:
                anchor = batch.input_ids[i - len(batch.reqs)]
                known.counts = known.counts.index_add(0, anchor.view(1), known.counts.new_ones(1))
            else:
                known = self._counted[str(request.rid)] = self._start(request)
            self._ask(batch.sampling_info, i, known)

    def constrain(self, requests: Sequence[Any], logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Penalises logits [n * w, V] of blocks of tokens [n, w], in place."""
        rows, known = self._of(requests)
        if not rows:
            return
        index = torch.tensor(rows, device=logits.device)
        counts = torch.stack([one.counts for one in known])
        knobs = torch.stack([one.knobs for one in known])
        stops = torch.stack([one.stops for one in known])
        by_slot = logits.view(len(tokens), tokens.shape[1], -1)
        for slot in range(tokens.shape[1]):
            counts = counts.scatter_add(1, tokens[index, slot : slot + 1], counts.new_ones(len(rows), 1))
            additive, scaling = _penalty(counts, knobs, stops)
            row = by_slot[index, slot].add_(additive)
            by_slot[index, slot] = torch.where(row < 0, row * scaling, row / scaling).to(logits.dtype)

    def settle(self, requests: Sequence[Any], tokens: torch.Tensor, gained: torch.Tensor) -> None:
        """Counts the first `gained` [n] tokens of each block [n, w]: anchor and accepted drafts; forgets the others."""
        rows, known = self._of(requests)
        self._counted = {str(requests[i].rid): one for i, one in zip(rows, known, strict=True)}
        for i, one in zip(rows, known, strict=True):
            taken = torch.arange(tokens.shape[1], device=tokens.device) < gained[i]
            one.counts = one.counts.index_add(0, tokens[i], taken.to(one.counts.dtype))

    def _of(self, requests: Sequence[Any]) -> tuple[list[int], list[_Counted]]:
        rows = [i for i, request in enumerate(requests) if str(request.rid) in self._counted]
        return rows, [self._counted[str(requests[i].rid)] for i in rows]

    def _start(self, request: Any) -> _Counted:
        params = request.sampling_params
        put_out = torch.tensor(list(request.output_ids), dtype=torch.int64, device=self.device)
        counts = torch.bincount(put_out, minlength=self.vocab_size).to(torch.float32)
        stops = torch.zeros(self.vocab_size, device=self.device)
        if params.min_new_tokens > 0:
            stops[torch.tensor(sorted(_stop_ids(request, params)), dtype=torch.int64, device=self.device)] = -torch.inf
        numbers = [params.frequency_penalty, params.presence_penalty, params.repetition_penalty, params.min_new_tokens]
        return _Counted(counts, torch.tensor(numbers, dtype=torch.float32, device=self.device), stops)

    def _ask(self, sampling_info: Any, row: int, one: _Counted) -> None:
        """Has SGLang's own sampling penalise a prefill's token by what we counted."""
        additive, scaling = _penalty(one.counts[None], one.knobs[None], one.stops[None])
        shape = (len(sampling_info), self.vocab_size)
        if sampling_info.acc_additive_penalties is None:
            sampling_info.acc_additive_penalties = torch.zeros(shape, device=self.device)
        if sampling_info.acc_scaling_penalties is None:
            sampling_info.acc_scaling_penalties = torch.ones(shape, device=self.device)
        sampling_info.acc_additive_penalties[row] = additive[0]
        sampling_info.acc_scaling_penalties[row] = scaling[0]


def _penalty(counts: torch.Tensor, knobs: torch.Tensor, stops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms added to the logits of the next token, and factors applied after that, [p, V] each."""
    frequency, presence, repetition, least = knobs[:, :, None].unbind(1)
    seen = counts > 0
    early = counts.sum(1, keepdim=True) < least
    additive = -frequency * counts - presence * seen + torch.where(early, stops, 0.0)
    return additive, torch.where(seen, repetition, 1.0)


def _stop_ids(request: Any, params: Any) -> set[int]:  # as in `BatchedMinNewTokensPenalizer`
    tokenizer = request.tokenizer
    ids = {*(params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    ids |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
    return {int(token) for token in ids if token is not None}

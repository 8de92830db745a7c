"""Penalties under speculation: every token of an answer is counted, in order, as a plain decoding loop does.

SGLang counts nothing in speculative steps, and adds one penalty to all rows of a block. Here the row of slot j is
penalised by everything up to the block's token j, and what a step gains is counted when it has gained it. A step takes
one pass over all rows with the counts before the block, and corrects in each row the few tokens of the block itself.

Counts live on the device, a row of one table for each request. A step never waits for the device, and sends it nothing
while the batch stays the same: with overlapped scheduling the host is a step behind. The number of kernels does not
depend on the width.

Shapes: n requests in a batch, p of them penalised, w slots verified, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .refusals import penalties_of


class _Penalised(NamedTuple):
    """The penalised requests of a batch."""

    places: tuple[tuple[int, int], ...]  # (index in the batch, row of the tables) of each
    rows: Tensor  # [p], indices in the batch, on the device
    slots: Tensor  # [p], rows of the tables, on the device
    with_stops: bool  # True if one of them has min_new_tokens


class Penalties:
    """The counts of all penalised requests that run."""

    def __init__(self, vocab_size: int, device: Any) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._slots: dict[Any, int] = {}  # row of the tables by request; a client may give its id to another one later
        self._free: list[int] = []
        self._counts = torch.zeros(0, vocab_size, device=device)  # of an answer's tokens up to and without its anchor
        self._stops = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # excluded before min_new_tokens
        self._knobs = torch.zeros(0, 4, device=device)  # frequency, presence and repetition penalty, min_new_tokens
        self._batch: _Penalised | None = None

    def concern(self, requests: Sequence[Any]) -> bool:
        """True if one of the requests is penalised."""
        return bool(self._slots) and any(request in self._slots for request in requests)

    def at_prefill(self, batch: Any) -> None:
        """Counts what a request has put out before its prefill (after a retraction), and penalises its next token.

        Requests that decode in a mixed batch put their anchors through the target: these count from now on.
        """
        first = len(batch.reqs) - len(batch.decoding_reqs or ())
        for i, request in enumerate(batch.reqs):
            if not penalties_of(request.sampling_params):
                continue
            slot = self._slots.get(request)
            if i >= first and slot is not None:
                anchor = batch.input_ids[i - len(batch.reqs)]
                self._counts[slot].index_add_(0, anchor.view(1), self._counts.new_ones(1))
            else:
                slot = self._start(request)
            self._ask(batch.sampling_info, i, slot)

    def constrain(self, requests: Sequence[Any], logits: Tensor, tokens: Tensor) -> None:
        """Penalises logits [n * w, V] of blocks of tokens [n, w], in place."""
        batch = self._of(requests)
        if not batch.places:
            return
        width, by_slot = tokens.shape[1], logits.view(len(tokens), tokens.shape[1], -1)
        counts, knobs = self._counts[batch.slots][:, None], self._knobs[batch.slots][:, :, None, None].unbind(1)
        stopped = None
        if batch.with_stops:
            put_out = counts.sum(2, keepdim=True) + torch.arange(1, width + 1, device=logits.device)[:, None]
            stopped = self._stops[batch.slots][:, None] & (put_out < knobs[3])
        raw, block = by_slot[batch.rows], tokens[batch.rows]
        found = _penalised(raw, *_terms(counts, stopped, knobs))
        own = block[:, None].expand(-1, width, -1)  # [p, w, w]: in every row the block's tokens
        so_far = (own == block[:, :, None]).cumsum(1)  # times that each stands in the block, up to the row's slot
        counts = counts.expand(-1, width, -1).gather(2, own) + so_far
        stopped = None if stopped is None else stopped.gather(2, own)
        found.scatter_(2, own, _penalised(raw.gather(2, own), *_terms(counts, stopped, knobs)))
        by_slot[batch.rows] = found.to(logits.dtype)

    def settle(self, requests: Sequence[Any], tokens: Tensor, gained: Tensor) -> None:
        """Counts the first `gained` [n] tokens of each block [n, w]: anchor and accepted drafts; forgets requests that
        are not in the batch.
        """
        batch = self._of(requests)
        taken = torch.arange(tokens.shape[1], device=tokens.device) < gained[batch.rows][:, None]
        places = batch.slots[:, None] * self.vocab_size + tokens[batch.rows]
        self._counts.view(-1).scatter_add_(0, places.flatten(), taken.flatten().to(self._counts.dtype))
        self._forget(self._slots.keys() - set(requests))

    def _of(self, requests: Sequence[Any]) -> _Penalised:
        places = tuple((i, self._slots[one]) for i, one in enumerate(requests) if one in self._slots)
        if self._batch is None or self._batch.places != places:
            rows, slots = (self._sent([place[part] for place in places], torch.int64) for part in (0, 1))
            with_stops = any(requests[i].sampling_params.min_new_tokens > 0 for i, _ in places)
            self._batch = _Penalised(places, rows, slots, with_stops)
        return self._batch

    def _start(self, request: Any) -> int:
        """Gives a request a row of the tables, filled with what it has put out."""
        if request not in self._slots:
            if not self._free:  # no step came after the prefill of those that ended with it
                self._forget([one for one in self._slots if one.finished()])
            if not self._free:
                self._grow()
            self._slots[request] = self._free.pop()
        slot, self._batch = self._slots[request], None
        params = request.sampling_params
        put_out = self._sent(list(request.output_ids), torch.int64)
        self._counts[slot].zero_().index_add_(0, put_out, self._counts.new_ones(len(put_out)))
        stops = _stop_ids(request, params) if params.min_new_tokens > 0 else ()
        self._stops[slot].zero_().index_fill_(0, self._sent(sorted(stops), torch.int64), True)
        numbers = [params.frequency_penalty, params.presence_penalty, params.repetition_penalty, params.min_new_tokens]
        self._knobs[slot].copy_(self._sent(numbers, torch.float32))
        return slot

    def _forget(self, requests: Iterable[Any]) -> None:
        self._free += [self._slots.pop(request) for request in requests]

    def _grow(self) -> None:
        known = len(self._counts)
        more = max(8, known)
        tables = (self._counts, self._stops, self._knobs)
        grown = [torch.cat([table, table.new_zeros(more, table.shape[1])]) for table in tables]
        self._counts, self._stops, self._knobs = grown
        self._free = list(range(known, known + more))

    def _ask(self, sampling_info: Any, row: int, slot: int) -> None:
        """Has SGLang's own sampling penalise a prefill's token by what we counted."""
        knobs, counts = self._knobs[slot].unbind(), self._counts[slot]
        additive, scaling = _terms(counts, self._stops[slot] & (counts.sum() < knobs[3]), knobs)
        shape = (len(sampling_info), self.vocab_size)
        if sampling_info.acc_additive_penalties is None:
            sampling_info.acc_additive_penalties = torch.zeros(shape, device=self.device)
        if sampling_info.acc_scaling_penalties is None:
            sampling_info.acc_scaling_penalties = torch.ones(shape, device=self.device)
        sampling_info.acc_additive_penalties[row] = additive
        sampling_info.acc_scaling_penalties[row] = scaling

    def _sent(self, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """The numbers on the device; from pinned memory, else the copy would wait for the device."""
        pinned = self.device.type == "cuda"
        return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(self.device, non_blocking=pinned)


def _terms(counts: Tensor, stopped: Tensor | None, knobs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Terms added to the logits of the next token, and factors applied after that, of the shape of `counts`."""
    frequency, presence, repetition, _ = knobs
    seen = counts > 0
    additive = -frequency * counts - presence * seen
    return additive if stopped is None else additive.masked_fill(stopped, -torch.inf), torch.where(
        seen, repetition, 1.0
    )


def _penalised(logits: Tensor, additive: Tensor, scaling: Tensor) -> Tensor:
    logits = logits + additive
    return torch.where(logits < 0, logits * scaling, logits / scaling)


def _stop_ids(request: Any, params: Any) -> set[int]:  # as in `BatchedMinNewTokensPenalizer`
    tokenizer = request.tokenizer
    ids = {*(params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    ids |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
    return {int(token) for token in ids if token is not None}

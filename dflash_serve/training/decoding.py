"""Continuous batch decoding: a place in the batch is refilled as its answer ends. It makes data, and serves nobody.

Unlike serving, products are whatever is fastest for 64-256 rows at once, at the price that a bf16 answer may depend, in
ties, on its neighbours. For data that is of no consequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from dflash_serve.models.attention import PaddedAttention, PrefillAttention
from dflash_serve.models.kv_cache import Span, span_positions
from dflash_serve.models.target import TargetAttend, TargetModel

LONGEST_PERIOD, REPEATS, SHORTEST_TAIL = 24, 4, 24
"""What counts as a loop: see `repeated_tail`."""
LOOP_CHECK_EVERY = 16
PREFILL_AT_ONCE = 16


@dataclass(frozen=True)
class Request:
    """A prompt to continue; temperature 0 is greedy."""

    index: int
    prompt: tuple[int, ...]
    temperature: float = 0.0


@dataclass
class Completion:
    """A continued prompt. `ended`: by a stop token (kept, the last one), not by the limit; `looped`: cut in a loop.
    `features` [length - 1, F*H], where they are kept: of prompt and answer but for the last token, which was not read.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    looped: bool = False
    features: Tensor | None = None


class BatchDecoder:
    """Decodes a stream of requests, `max_batch_size` at a time; cuts an answer that repeats itself (`repeated_tail`).

    Args:
        capacity: most tokens of prompt and answer together.
        stop_ids: tokens that end an answer.
        layer_ids: 0-based layers whose outputs are kept as the completions' features.
    """

    def __init__(
        self,
        target: TargetModel,
        *,
        max_batch_size: int,
        capacity: int,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        seed: int,
        layer_ids: Sequence[int] = (),
    ) -> None:
        self.target, self.max_new_tokens, self.layer_ids = target, max_new_tokens, tuple(layer_ids)
        self.compiled = target.compile_operators()
        self.stop_ids = frozenset(stop_ids)
        self.device = target.embedding.device
        self.cache = target.new_cache(max_batch_size, capacity)
        self.cache.keys.zero_()  # a masked NaN of uninitialised memory would still poison its row
        self.cache.values.zero_()
        self.active: list[Completion | None] = [None] * max_batch_size
        self.last = torch.zeros(max_batch_size, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(max_batch_size, dtype=torch.int64, device=self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        columns = len(self.layer_ids) * target.config.hidden_size
        self.features = target.embedding.new_empty(max_batch_size, capacity, columns)

    @torch.inference_mode()
    def decode(self, requests: Iterator[Request]) -> Iterator[Completion]:
        """Yields completions as they end, in no fixed order."""
        self._refill(requests)
        while any(self.active):
            yield from self._step()
            # Refilled some at a time: a prefill of one prompt costs nearly what one of many does.
            if self.active.count(None) >= max(1, len(self.active) // 16):
                self._refill(requests)

    def _refill(self, requests: Iterator[Request]) -> None:
        free = [entry for entry, completion in enumerate(self.active) if completion is None]
        new = list(zip(free, islice(requests, len(free)), strict=False))
        # In portions: on a CPU the activations of thousands of rows fall out of the caches.
        for first in range(0, len(new), PREFILL_AT_ONCE):
            self._prefill(new[first : first + PREFILL_AT_ONCE])

    def _prefill(self, new: Sequence[tuple[int, Request]]) -> None:
        spans = [Span(entry, 0, len(request.prompt)) for entry, request in new]
        token_ids = torch.tensor([token for _, request in new for token in request.prompt], device=self.device)
        attention = PrefillAttention(self.cache, spans, self.target.config.layers)
        hidden, features = self.target(token_ids, span_positions(spans, self.device), attention, self.layer_ids)
        if features is not None:
            for span, rows in zip(spans, features.split([span.length for span in spans]), strict=True):
                self.features[span.entry, : span.length] = rows
        ends = torch.tensor([span.length for span in spans], device=self.device).cumsum(0) - 1
        entries = torch.tensor([entry for entry, _ in new], device=self.device)
        temperatures = [request.temperature for _, request in new]
        self.last[entries] = self._choose(hidden[ends], temperatures)
        self.positions[entries] = torch.tensor([span.length for span in spans], device=self.device)
        for (entry, request), token in zip(new, self.last[entries].tolist(), strict=True):
            self.active[entry] = Completion(request, [token])

    def _step(self) -> Iterator[Completion]:
        """Hands out what has ended, then adds one token to every other answer."""
        for entry, completion in enumerate(self.active):
            if completion is not None and self._is_done(completion):
                if self.layer_ids:
                    length = len(completion.request.prompt) + len(completion.tokens)
                    completion.features = self.features[entry, : length - 1].cpu().clone()
                self.active[entry] = None
                self.positions[entry] = 0
                yield completion
        if not any(self.active):
            return
        hidden, features = self.target(self.last, self.positions, self._attention(), self.layer_ids)
        if features is not None:
            self.features[torch.arange(len(features), device=self.device), self.positions] = features
        self.last = self._choose(hidden, [c.request.temperature if c else 0.0 for c in self.active])
        self.positions += 1
        for completion, token in zip(self.active, self.last.tolist(), strict=True):
            if completion is not None:
                completion.tokens.append(token)

    def _attention(self) -> TargetAttend:
        """Over every place's own keys where that is compiled, else over all places padded to the longest."""
        places = self.positions.tolist()
        if self.compiled:
            return self.target.attention(self.cache, [Span(entry, place, 1) for entry, place in enumerate(places)])
        config = self.target.config
        heads, length = config.num_attention_heads, max(places) + 1
        return PaddedAttention(self.cache, None, self.positions[:, None], length, config.layers, heads)

    def _choose(self, hidden: Tensor, temperatures: Sequence[float]) -> Tensor:
        """Next token ids int64 [rows] of hidden states [rows, H]."""
        logits = self.target.logits(hidden)
        chosen = logits.argmax(-1)
        rows = torch.tensor([row for row, t in enumerate(temperatures) if t > 0], dtype=torch.int64, device=self.device)
        if len(rows):
            heat = torch.tensor([t for t in temperatures if t > 0], device=self.device)
            # Inverse transform: one uniform number a row; torch.multinomial draws one for each token of the vocabulary.
            cumulative = (logits[rows].float() / heat[:, None]).softmax(-1).cumsum(-1)
            uniform = torch.rand((len(rows), 1), generator=self.generator, device=self.device) * cumulative[:, -1:]
            chosen[rows] = torch.searchsorted(cumulative, uniform)[:, 0].clamp_(max=logits.shape[-1] - 1)
        return chosen

    def _is_done(self, completion: Completion) -> bool:
        tokens = completion.tokens
        completion.ended = tokens[-1] in self.stop_ids
        if completion.ended or len(tokens) >= self.max_new_tokens:
            return True
        if len(tokens) % LOOP_CHECK_EVERY == 0 and (period := repeated_tail(tokens)):
            completion.looped = True
            del tokens[len(tokens) - 2 * period :]
        return completion.looped


def repeated_tail(tokens: Sequence[int]) -> int:
    """The shortest period n <= 24 with which the tail repeats, 0 where it does not.

    The rule: the last max(4n, 24) tokens are one n-gram over and over, i.e. each equals the token n before it.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        tail = max(REPEATS * period, SHORTEST_TAIL)
        if len(tokens) < tail:
            continue
        last = tokens[-tail:]
        if last[period:] == last[:-period]:
            return period
    return 0

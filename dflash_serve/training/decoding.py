"""Continuous batch decoding: slots of a batch are refilled as answers end. It makes data, and serves nobody.

Unlike serving, all slots attend in one padded call: several times faster at 64-256 slots on a CPU, at the price that a
bf16 answer may depend, in ties, on its neighbours. For data that is of no consequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.training.repetition import repeated_tail
from dflash_serve.training.target import PackedCausalAttention, Target, run_layers

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
    """A continued prompt. `ended`: by a stop token (kept, the last one), not by the limit; `looped`: cut in a loop."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    looped: bool = False


class PrefillAttention(PackedCausalAttention):
    """Whole prompts, each kept in its slot of a cache."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind]) -> None:
        super().__init__([span.length for span in spans], kinds, cache.keys.device)
        self.cache, self.spans = cache, spans

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.spans, k, v)
        return super().__call__(layer, q, k, v)


class SlotAttention:
    """One new row for every slot of a cache, attended in one padded call. Satisfies `drafter.model.Attend`."""

    def __init__(self, cache: KVCache, positions: Tensor, kinds: Sequence[AttentionKind]) -> None:
        self.cache, self.positions, self.kinds = cache, positions, kinds
        self.seen = int(positions.max()) + 1
        self.rows = torch.arange(len(positions), device=positions.device)
        self.masks = {kind: self._mask(kind) for kind in set(kinds)}

    def _mask(self, kind: AttentionKind) -> Tensor:
        distance = self.positions[:, None] - torch.arange(self.seen, device=self.positions.device)
        visible = distance >= 0 if kind.window is None else (distance >= 0) & (distance < kind.window)
        return visible[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = k
        values[self.rows, :, self.positions] = v
        slots, kv_heads, _ = k.shape
        grouped = q.view(slots, kv_heads, -1, q.shape[-1])
        mask = self.masks[self.kinds[layer]]
        out = F.scaled_dot_product_attention(
            grouped, keys[:, :, : self.seen], values[:, :, : self.seen], attn_mask=mask
        )
        return out.reshape(q.shape)


class BatchDecoder:
    """Decodes a stream of requests on `slots` slots.

    Args:
        capacity: most tokens of prompt and answer together.
        stop_ids: tokens that end an answer.
        cut_loops: end an answer once it repeats itself (`repetition.repeated_tail`).
    """

    def __init__(
        self,
        target: Target,
        *,
        slots: int,
        capacity: int,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        seed: int,
        cut_loops: bool = True,
    ) -> None:
        self.target, self.max_new_tokens, self.cut_loops = target, max_new_tokens, cut_loops
        self.stop_ids = frozenset(stop_ids)
        self.device = target.embedding.device
        self.cache = target.new_cache(slots, capacity)
        self.cache.keys.zero_()  # a masked NaN of uninitialised memory would still poison its row
        self.cache.values.zero_()
        self.active: list[Completion | None] = [None] * slots
        self.last = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

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
        free = [slot for slot, completion in enumerate(self.active) if completion is None]
        new = list(zip(free, islice(requests, len(free)), strict=False))
        # In portions: on a CPU the activations of thousands of rows fall out of the caches.
        for first in range(0, len(new), PREFILL_AT_ONCE):
            self._prefill(new[first : first + PREFILL_AT_ONCE])

    def _prefill(self, new: Sequence[tuple[int, Request]]) -> None:
        spans = [Span(slot, 0, len(request.prompt)) for slot, request in new]
        token_ids = torch.tensor([token for _, request in new for token in request.prompt], device=self.device)
        attention = PrefillAttention(self.cache, spans, self.target.config.layers)
        hidden, _ = run_layers(self.target, token_ids, span_positions(spans, self.device), attention)
        ends = torch.tensor([span.length for span in spans], device=self.device).cumsum(0) - 1
        slots = torch.tensor([slot for slot, _ in new], device=self.device)
        temperatures = [request.temperature for _, request in new]
        self.last[slots] = self._choose(hidden[ends], temperatures)
        self.positions[slots] = torch.tensor([span.length for span in spans], device=self.device)
        for (slot, request), token in zip(new, self.last[slots].tolist(), strict=True):
            self.active[slot] = Completion(request, [token])

    def _step(self) -> Iterator[Completion]:
        """Hands out what has ended, then adds one token to every slot still at work."""
        for slot, completion in enumerate(self.active):
            if completion is not None and self._is_done(completion):
                self.active[slot] = None
                self.positions[slot] = 0
                yield completion
        if not any(self.active):
            return
        attention = SlotAttention(self.cache, self.positions, self.target.config.layers)
        hidden, _ = run_layers(self.target, self.last, self.positions, attention)
        self.last = self._choose(hidden, [c.request.temperature if c else 0.0 for c in self.active])
        self.positions += 1
        for completion, token in zip(self.active, self.last.tolist(), strict=True):
            if completion is not None:
                completion.tokens.append(token)

    def _choose(self, hidden: Tensor, temperatures: Sequence[float]) -> Tensor:
        """Next token ids int64 [rows] of hidden states before the final norm [rows, H]."""
        logits = self.target.logits(self.target.norm(hidden))
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
        if self.cut_loops and len(tokens) % LOOP_CHECK_EVERY == 0 and (period := repeated_tail(tokens)):
            completion.looped = True
            del tokens[len(tokens) - 2 * period :]
        return completion.looped

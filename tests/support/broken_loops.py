"""A decoding loop that accepts a good part of its drafts, and four ways to break it that users have met.

Each takes the real Scheduler and rules of acceptance and spoils one thing, as a bug in an engine would.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.answers.engine import Prompt
from dflash_serve.speculation import sampling
from dflash_serve.speculation.acceptance import count_accepted
from dflash_serve.speculation.noise import draw
from dflash_serve.speculation.params import SamplingParams
from dflash_torch import sampler as verdict
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.request import Request
from dflash_torch.scheduler import Scheduler
from dflash_torch.speculator import Speculator
from tests.support.embedded import answers, tiny_engine
from tests.support.tiny_target import write_tiny_pair

WIDTH, SLOTS = 4, 32
SHARPNESS = 5.0
Prefix = tuple[int, ...]


def sharp_pair(folder: Path, *, positions: int = 256) -> tuple[Path, Path]:
    """The tiny pair with larger logits: its answers repeat themselves, as a language model's do, and can be guessed."""
    target, drafter = write_tiny_pair(folder, positions=positions)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] *= SHARPNESS
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target, drafter


class LikelySpeculator(Speculator):
    """Drafts what came most often after the same tokens, and now and then something else."""

    likely: Mapping[Prefix, int]

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        own = super().draft(requests, widths)  # the real pass, for its effects on the K/V caches
        each = zip(requests, widths, own, strict=True)  # a grammar allows only drafts of its own
        return [s_own if s.grammar else self._continue(tuple(s.token_ids), width) for s, width, s_own in each]

    def _continue(self, tokens: Prefix, width: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < width - 1:
            guess = self.likely.get((*tokens, *drafted), 5)
            drafted.append(5 if (len(tokens) + len(drafted)) % 5 == 0 else guess)
        return drafted


def likely_tokens(folders: tuple[Path, Path], asked: Sequence[tuple[Prompt, SamplingParams]]) -> dict[Prefix, int]:
    """What plain decoding says most often after the same tokens, over the answers to `asked`."""
    plain = tiny_engine(folders, width=1, max_batch_size=SLOTS)
    following: dict[Prefix, Counter[int]] = defaultdict(Counter)
    for output in answers(plain, [prompt for prompt, _ in asked], [params for _, params in asked]):
        tokens = tuple(output.prompt_token_ids + output.token_ids)
        for end in range(len(output.prompt_token_ids), len(tokens)):
            following[tokens[:end]][tokens[end]] += 1
    return {prefix: counts.most_common(1)[0][0] for prefix, counts in following.items()}


def guessing_engine(folders: tuple[Path, Path], likely: Mapping[Prefix, int]) -> EmbeddedEngine:
    """An engine whose drafts are likely tokens."""
    engine = tiny_engine(folders, width=WIDTH, max_batch_size=SLOTS)
    speculator = engine.scheduler.speculator
    assert speculator is not None
    speculator.__class__, speculator.likely = LikelySpeculator, likely  # type: ignore[attr-defined]
    return engine


def spoil_draws(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Draws the target's tokens by a rule that knows the drafts, beside distributions and random numbers."""
    own_tokens = verdict.Sampler.own_tokens

    def own(sampler: verdict.Sampler, requests: Sequence[Request], logits: Tensor, draft: Tensor, *rest: Any) -> Tensor:
        monkeypatch.setattr(verdict, "draw", partial(wrong, draft))
        return own_tokens(sampler, requests, logits, draft, *rest)

    monkeypatch.setattr(verdict.Sampler, "own_tokens", own)


def wrong_residual(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from the target's whole distribution, the rejected token included."""

    def wrong(draft: Tensor, p: Tensor, uniforms: Tensor) -> Tensor:
        right, drafted = draw(p, uniforms), (draft >= 0).sum(1)
        accepted = count_accepted(draft, right, drafted)[:, None]
        afresh = (uniforms.gather(1, accepted) * 1e6) % 1  # independent of the number that rejected the draft
        again = draw(p.gather(1, accepted[..., None].expand(-1, 1, p.shape[-1])), afresh)
        return torch.where(accepted < drafted[:, None], right.scatter(1, accepted, again), right)

    spoil_draws(monkeypatch, wrong)


def stale_state(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The K/V of a rejected token stays where that of the token that replaced it belongs."""
    engine.scheduler.__class__ = StaleDecoder


class StaleDecoder(Scheduler):
    """Puts the K/V of rejected tokens back after the pass that should have replaced them."""

    def _verify(
        self,
        requests: Sequence[Request],
        pending: list[list[int]],
        drafts: list[list[int]],
        layer_ids: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor | None]]:
        kept = [self._row(request).clone() for request in requests]
        result = super()._verify(requests, pending, drafts, layer_ids)
        for request, row in zip(requests, kept, strict=True):
            if request.steps and request.steps[-1][1] < request.steps[-1][0] - 1:
                self._row(request).copy_(row)
        return result

    def _row(self, request: Request) -> Tensor:
        """The keys of the place that the anchor is about to take, [layers, kv_heads, head_dim]."""
        return self.cache.keys[:, request.entry, :, request.verified]


def frozen_penalties(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties inside a block count what was committed before it, and not the block's own tokens."""

    def none(tokens: Tensor, rows: int) -> Tensor:
        return torch.zeros(tokens.shape[0], rows, tokens.shape[1], dtype=torch.int32)

    monkeypatch.setattr(sampling, "_occurrences", none)


def greedy_verification(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens of sampled requests are judged against the most probable token, and so is the bonus token."""

    def wrong(draft: Tensor, p: Tensor, uniforms: Tensor) -> Tensor:
        return torch.where((draft >= 0).any(1, keepdim=True), p.argmax(-1), draw(p, uniforms))

    spoil_draws(monkeypatch, wrong)


Break = Callable[[EmbeddedEngine, pytest.MonkeyPatch], None]

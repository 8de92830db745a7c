"""From the target's logits of a ragged batch to the tokens each sequence gains."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_serve.outputs import TokenLogprob
from dflash_serve.speculation.acceptance import Acceptance, accept_matching, accept_sampled
from dflash_serve.speculation.batch import SamplingBatch
from dflash_serve.speculation.noise import BlockNoise
from dflash_serve.speculation.penalties import TokenCounts
from dflash_serve.speculation.sampling import greedy_tokens, probabilities

from .sequence import Sequence


@dataclass(frozen=True)
class Gain:
    """What one step brought one sequence: tokens, and a logprob for each where it asked for them."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None

    def first(self, count: int) -> Gain:
        """The same, cut after `count` tokens."""
        return Gain(self.sequence, self.token_ids[:count], self.logprobs and self.logprobs[:count])


def judge(sequences: Many[Sequence], drafts: Many[list[int]], logits: Tensor) -> list[Gain]:
    """What each sequence gains: its accepted drafted tokens and the bonus token.

    Args:
        drafts: the drafted tokens of each, `width - 1` of them.
        logits: [rows, V], `width` rows a sequence, after one another.
    """
    device = logits.device
    widths = [1 + len(draft) for draft in drafts]
    batch = SamplingBatch.of([s.params for s in sequences], logits.shape[-1], device)
    padded_draft = _pad([torch.tensor(draft, dtype=torch.int64) for draft in drafts], value=-1).to(device)
    raw = logits[None] if len(widths) == 1 else _pad(list(logits.split(widths)))
    padded = _grammatical(sequences, drafts, raw)
    counts = _counts(sequences, batch, logits.shape[-1], device)
    width_tensor = torch.tensor(widths, device=device)
    verdict: Acceptance
    if batch.all_greedy:
        verdict = accept_matching(padded_draft, greedy_tokens(padded, batch, counts, padded_draft), width_tensor)
    else:
        seeds = torch.tensor([s.seed for s in sequences], device=device)
        first = torch.tensor([len(s.output_ids) for s in sequences], device=device)
        noise = BlockNoise.of(seeds, first, padded.shape[1])
        p = probabilities(padded, batch, counts, padded_draft)
        verdict = accept_sampled(padded_draft, p, width_tensor, noise)
    gained = [[token for token in tokens if token >= 0] for tokens in verdict.committed(padded_draft).tolist()]
    return [
        Gain(sequence, tokens, _logprobs(rows, tokens, sequence.params.logprobs))
        for sequence, tokens, rows in zip(sequences, gained, raw, strict=True)
    ]


def _logprobs(rows: Tensor, tokens: list[int], top: int | None) -> list[TokenLogprob] | None:
    """Exact under speculation: row j is the target's own, of the token it decided. rows [W, V]."""
    if top is None:
        return None
    logprobs = rows[: len(tokens)].float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(top, dim=-1)
    tops = [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens, chosen, map(tuple, tops), strict=True)]


def _grammatical(sequences: Many[Sequence], drafts: Many[list[int]], logits: Tensor) -> Tensor:
    """[N, W, V]: -inf where a sequence's grammar forbids; `logits` itself where nobody has one."""
    if all(s.grammar is None for s in sequences):
        return logits
    logits = logits.clone()
    for rows, sequence, draft in zip(logits, sequences, drafts, strict=True):
        if sequence.grammar is not None:
            allowed = sequence.grammar.masks(draft, logits.device)
            rows[: len(allowed)].masked_fill_(~allowed, float("-inf"))
    return logits


def _pad(rows: list[Tensor], value: float = 0.0) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)


def _counts(sequences: Many[Sequence], batch: SamplingBatch, vocab: int, device: torch.device) -> TokenCounts | None:
    if not batch.penalised:
        return None
    prompts = [s.token_ids[: s.prompt_length] for s in sequences]
    return TokenCounts.of(prompts, [s.output_ids for s in sequences], vocab, device)


def last_rows(pending: list[list[int]], drafts: list[list[int]], heads: list[int]) -> list[int] | None:
    """Rows of the flat batch whose logits are needed: each head's anchor and drafted slots. None = all of them."""
    rows: list[int] = []
    first = 0
    for index, (prompt, draft) in enumerate(zip(pending, drafts, strict=True)):
        end = first + len(prompt) + len(draft)
        if index in heads:
            rows += range(end - len(draft) - 1, end)
        first = end
    return None if len(rows) == first else rows

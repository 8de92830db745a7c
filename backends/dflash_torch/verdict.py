"""From the target's logits of a ragged batch to the tokens each sequence gains."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_serve.speculation.acceptance import Acceptance, accept_matching, accept_sampled
from dflash_serve.speculation.batch import SamplingBatch
from dflash_serve.speculation.noise import BlockNoise
from dflash_serve.speculation.penalties import TokenCounts
from dflash_serve.speculation.sampling import greedy_tokens, probabilities

from .sequence import Sequence


def judge(sequences: Many[Sequence], drafts: Many[list[int]], logits: Tensor) -> list[list[int]]:
    """Tokens gained by each sequence: its accepted drafted tokens and the bonus token.

    Args:
        drafts: the drafted tokens of each, `width - 1` of them.
        logits: [rows, V], `width` rows a sequence, after one another.
    """
    device = logits.device
    widths = [1 + len(draft) for draft in drafts]
    batch = SamplingBatch.of([s.params for s in sequences], logits.shape[-1], device)
    padded_draft = _pad([torch.tensor(draft, dtype=torch.int64) for draft in drafts], value=-1).to(device)
    padded = logits[None] if len(widths) == 1 else _pad(list(logits.split(widths)))
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
    gained = verdict.committed(padded_draft).tolist()
    return [[token for token in tokens if token >= 0] for tokens in gained]


def _pad(rows: list[Tensor], value: float = 0.0) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)


def _counts(sequences: Many[Sequence], batch: SamplingBatch, vocab: int, device: torch.device) -> TokenCounts | None:
    if not batch.penalised:
        return None
    prompts = [s.token_ids[: s.prompt_length] for s in sequences]
    return TokenCounts.of(prompts, [s.output_ids for s in sequences], vocab, device)

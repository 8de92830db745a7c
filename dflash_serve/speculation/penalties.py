"""Repetition, presence and frequency penalties that stay exact inside a block."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_serve.speculation.batch import SamplingBatch


@dataclass(frozen=True)
class TokenCounts:
    """Which tokens each request has seen so far.

    in_prompt: [N, V] bool. in_output: [N, V] int32, the committed output tokens, the anchor among them.
    """

    in_prompt: Tensor
    in_output: Tensor

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str | None = None,
    ) -> "TokenCounts":
        in_prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        in_output = torch.zeros(len(prompts), vocab_size, dtype=torch.int32, device=device)
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            in_prompt[row, torch.tensor(prompt, dtype=torch.int64, device=device)] = True
            tokens = torch.tensor(output, dtype=torch.int64, device=device)
            in_output[row] = torch.bincount(tokens, minlength=vocab_size).int()
        return cls(in_prompt, in_output)

    def commit(self, tokens: Tensor) -> None:
        """Count newly committed tokens, [N, W] int64, in place; -1 pads (see `Acceptance.committed`)."""
        self.in_output.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).int())


def apply_penalties(logits: Tensor, batch: SamplingBatch, counts: TokenCounts, draft: Tensor) -> Tensor:
    """Penalise every row of a block as if its tokens had been generated one by one.

    Row j follows slots 1..j of the block, so its output counts are the committed ones plus those of these slots. Only
    tokens drafted in the block can differ from the committed counts, and there are at most W-1 of them: all rows are
    penalised with the committed counts, then in each row the logits of the block's tokens are computed again, from
    the untouched logits and the row's own counts. No [N, W, V] counts are made.

    Args:
        logits: [N, W, V] float32, logit bias applied; left untouched.
        batch: the strengths, [N] each.
        counts: what is committed; slot 0, the anchor, is counted there.
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
    """[N, W, W-1] int32: how often the token of slot i stands among slots 1..j (row j, 0-based; row 0 has none)."""
    same = (tokens[:, :, None] == tokens[:, None, :]).int()  # [N, i, m]
    counted = same.cumsum(2, dtype=torch.int32).transpose(1, 2)  # [N, m, i]: among slots 1..m
    none = counted.new_zeros(counted.shape[0], 1, counted.shape[2])
    return torch.cat([none, counted], dim=1)[:, :rows]


def _penalise(logits: Tensor, batch: SamplingBatch, in_prompt: Tensor, in_output: Tensor) -> Tensor:
    """Repetition (scales), then frequency and presence (subtract). Strengths that are off leave every bit as it was.

    logits [N, W, X]; in_prompt and in_output broadcast to it ([N, 1 or W, X]).
    """
    present = in_output > 0
    scale = torch.where(in_prompt | present, batch.repetition_penalty[:, None, None], 1.0)
    scaled = torch.where(logits > 0, logits / scale, logits * scale)
    frequency, presence = batch.frequency_penalty[:, None, None], batch.presence_penalty[:, None, None]
    return scaled - (frequency * in_output + presence * present)

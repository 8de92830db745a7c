"""The decoding loop: draft, verify, accept, commit, for a batch that requests join and leave between steps.

One step of a sequence sends its pending tokens (the prompt at first, the anchor alone after) and its drafted tokens
through the target in one flat batch. The paper's loop (section 4; dflash 0.1.0 `dflash_generate`) is the case of one
sequence; prefill is the case of a long pending part and no draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_serve.drafter.kv_store import Span
from dflash_serve.errors import UserError
from dflash_serve.speculation.noise import fresh_seed
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.speculation.width import WidthPolicy

from .sequence import Sequence
from .speculator import Speculator
from .target.model import TargetModel
from .verdict import judge


@dataclass(frozen=True)
class Gain:
    """What one step brought one sequence."""

    sequence: Sequence
    token_ids: list[int]


class Decoder:
    """Target, drafter and their stores, and the sequences that are running.

    Args:
        speculator: None = no speculation.
        policy: chooses the widths; not asked where there is no speculator.
        slots: sequences it runs at once.
        capacity: tokens of prompt and answer that one sequence may have.
        prefill_rows: most rows of one prompt in a step; bounds the memory of a long prompt's masks.
    """

    def __init__(
        self,
        target: TargetModel,
        speculator: Speculator | None,
        policy: WidthPolicy,
        *,
        slots: int,
        capacity: int,
        prefill_rows: int = 1024,
    ) -> None:
        self.target, self.speculator, self.policy = target, speculator, policy
        self.capacity, self.prefill_rows = capacity, prefill_rows
        self.store = target.new_store(slots, capacity + 1)
        self.free_slots = list(range(slots))
        self.running: list[Sequence] = []
        self.joined = 0

    def join(self, token_ids: Many[int], params: SamplingParams) -> Sequence:
        """Takes a request in; its prompt is prefilled in the next steps. There must be a free slot.

        Raises:
            UserError: as `check_prompt`.
        """
        self.check_prompt(token_ids)
        prompt = list(token_ids)
        limit = min(self.capacity, len(prompt) + (params.max_tokens or self.capacity))
        sequence = Sequence(
            id=self.joined,
            slot=self.free_slots.pop(0),
            token_ids=prompt,
            prompt_length=len(prompt),
            limit=limit,
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            statistics=AcceptanceStatistics(),
        )
        self.joined += 1
        self.running.append(sequence)
        return sequence

    def check_prompt(self, token_ids: Many[int]) -> None:
        """Refuses what could not run.

        Raises:
            UserError: an empty prompt, one that leaves no room for an answer, or token ids outside the vocabulary.
        """
        vocab = self.target.config.vocab_size
        if not token_ids:
            raise UserError("it has no tokens", where="prompt", do="send at least one")
        if len(token_ids) >= self.capacity:
            do = "shorten it, or raise limits.max_model_len if the target allows"
            raise UserError(f"{len(token_ids)} tokens, but the model holds {self.capacity}", where="prompt", do=do)
        if min(token_ids) < 0 or max(token_ids) >= vocab:
            raise UserError(f"a token id is outside the vocabulary of {vocab}", where="prompt")

    def leave(self, sequence: Sequence) -> None:
        """Lets a sequence go, finished or not; its slot is free from the next step on."""
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        self.policy.forget(sequence.id)

    @torch.inference_mode()
    def step(self) -> list[Gain]:
        """One step of every running sequence; finished ones leave."""
        sequences = list(self.running)
        drafts = self._draft(sequences)
        pending = [s.pending[: self.prefill_rows] for s in sequences]
        hidden, features = self._verify(sequences, pending, drafts)
        heads = [i for i, s in enumerate(sequences) if len(pending[i]) == len(s.pending)]
        rows = _last_rows(pending, drafts, heads)
        logits = self.target.logits(hidden if rows is None else hidden[rows])
        gained = dict(zip(heads, judge([sequences[i] for i in heads], [drafts[i] for i in heads], logits), strict=True))
        gains = []
        for index, sequence in enumerate(sequences):
            tokens = gained.get(index, [])
            self._commit(sequence, len(pending[index]), drafts[index], tokens, features[index])
            gains.append(Gain(sequence, self._end(sequence, tokens)))
        return gains

    def _draft(self, sequences: Many[Sequence]) -> list[list[int]]:
        """Drafted tokens of each sequence; [] where it is still in its prompt or its width is 1."""
        drafts: list[list[int]] = [[] for _ in sequences]
        decoding = [i for i, s in enumerate(sequences) if s.is_decoding]
        if self.speculator is None or not decoding:
            return drafts
        chosen = self.policy.widths([sequences[i].id for i in decoding])
        widths = {i: min(width, sequences[i].remaining) for i, width in zip(decoding, chosen, strict=True)}
        wide = [i for i in decoding if widths[i] > 1]
        if wide:
            filled = self.speculator.draft([sequences[i] for i in wide], [widths[i] for i in wide])
            for i, draft in zip(wide, filled, strict=True):
                drafts[i] = draft
        return drafts

    def _verify(
        self, sequences: Many[Sequence], pending: list[list[int]], drafts: list[list[int]]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """One target pass over all rows -> hidden [rows, H] and each sequence's features [its rows, F*H]."""
        blocks = [p + d for p, d in zip(pending, drafts, strict=True)]
        spans = [Span(s.slot, s.verified, len(block)) for s, block in zip(sequences, blocks, strict=True)]
        token_ids = torch.tensor([token for block in blocks for token in block], device=self.target.device)
        layer_ids = self.speculator.target_layer_ids if self.speculator else ()
        output = self.target(token_ids, spans, self.store, layer_ids)
        if output.features is None:
            return output.hidden, [None] * len(blocks)
        return output.hidden, list(output.features.split([len(block) for block in blocks]))

    def _commit(
        self, sequence: Sequence, pending: int, draft: list[int], tokens: list[int], features: Tensor | None
    ) -> None:
        """Keeps the K/V and features of the rows that stand: the pending tokens and the accepted drafted ones."""
        accepted = max(0, len(tokens) - 1)
        if sequence.is_decoding:
            sequence.statistics.record(1 + len(draft), accepted)
            self.policy.observe(sequence.id, 1 + len(draft), accepted)
        sequence.verified += pending + accepted
        sequence.token_ids += tokens
        if features is not None:
            sequence.features.append(features[: pending + accepted])

    def _end(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """The tokens up to the first that ends the answer; sets the finish_reason and lets a finished sequence go."""
        stops = set(sequence.params.stop_token_ids)
        if not sequence.params.ignore_eos:
            stops.update(self.target.config.eos_token_ids)
        for count, token in enumerate(tokens, start=1):
            if token in stops:
                sequence.finish_reason = "stop"
                del sequence.token_ids[len(sequence.token_ids) - len(tokens) + count :]
                tokens = tokens[:count]
                break
        else:
            if sequence.remaining <= 0:
                sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            self.leave(sequence)
        return tokens


def _last_rows(pending: list[list[int]], drafts: list[list[int]], heads: list[int]) -> list[int] | None:
    """Rows of the flat batch whose logits are needed: each head's anchor and drafted slots. None = all of them."""
    rows, first = [], 0
    for index, (prompt, draft) in enumerate(zip(pending, drafts, strict=True)):
        end = first + len(prompt) + len(draft)
        if index in heads:
            rows += range(end - len(draft) - 1, end)
        first = end
    return None if len(rows) == first else rows

"""The decoding loop: draft, verify, accept, commit, for a batch that requests join and leave between steps.

One step of a sequence sends its pending tokens (the prompt at first, the anchor alone after) and its drafted tokens
through the target in one flat batch. The paper's loop (section 4; dflash 0.1.0 `dflash_generate`) is the case of one
sequence; prefill is the case of a long pending part and no draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from dflash_serve.drafter.kv_store import Span
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.speculation.width import WidthPolicy

from .admission import check_request
from .ending import answer_length
from .grammar import Grammar
from .passes import TargetPass
from .sequence import Seat, Sequence
from .slots import Slots
from .speculator import Speculator
from .target.model import TargetModel
from .verdict import Gain, judge, last_rows

BACKLOG = 256
"""Rows of features that may wait for a draft; while speculation does not pay, they are injected in such portions."""


class Decoder:
    """Target, drafter and their stores, and the sequences that are running.

    Args:
        speculator: None = no speculation.
        policy: chooses the widths; not asked where there is no speculator.
        slots: sequences it runs at once.
        capacity: tokens of prompt and answer that one sequence may have.
        prefill_rows: most rows of one prompt in a step; bounds the memory of a long prompt's masks.
        reuse_prefixes: whether prompts may start from what earlier sequences left in the stores.
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
        reuse_prefixes: bool = True,
    ) -> None:
        self.target, self.speculator, self.policy = target, speculator, policy
        self.capacity, self.prefill_rows = capacity, prefill_rows
        widest = speculator.block_size if speculator else 1
        self.store = target.new_store(slots, capacity + widest)
        self.verify = TargetPass(target, self.store, widest)
        self.slots = Slots(slots, reuse=reuse_prefixes)
        self.running: list[Sequence] = []
        self.joined = 0
        self.statistics = AcceptanceStatistics()
        """Of all sequences that ever ran."""

    @property
    def free_slots(self) -> list[int]:
        """Slots without a running sequence."""
        return self.slots.free

    @torch.inference_mode()
    def join(
        self, token_ids: Many[int], params: SamplingParams, *, grammar: Grammar | None = None, salt: str = ""
    ) -> Sequence:
        """Takes a request in; its prompt is prefilled in the next steps. There must be a free slot.

        Args:
            grammar: what its answer must match, fresh.
            salt: only requests of the same salt may share prefixes.

        Raises:
            UserError: as `check`.
        """
        self.check(token_ids, params)
        seat = self.slots.take(list(token_ids), salt)
        self._copy_prefix(seat)
        limit = min(self.capacity, len(token_ids) + (params.max_tokens or self.capacity))
        sequence = Sequence.seated(self.joined, seat, token_ids, params, limit=limit, grammar=grammar, salt=salt)
        self.joined += 1
        self.slots.give(sequence)
        self.running.append(sequence)
        return sequence

    def check(self, token_ids: Many[int], params: SamplingParams) -> None:
        """Refuses what could not run.

        Raises:
            UserError: as `admission.check_request`.
        """
        check_request(token_ids, params, capacity=self.capacity, vocab_size=self.target.config.vocab_size)

    def leave(self, sequence: Sequence, *, sound: bool = True) -> None:
        """Lets a sequence go, finished or not; its slot is free from the next step on.

        Args:
            sound: False = its K/V may be broken (a step failed half-way) and must not be lent.
        """
        self.running.remove(sequence)
        self.slots.release(sequence, keep=sound)
        self.policy.forget(sequence.id)

    @torch.inference_mode()
    def step(self) -> list[Gain]:
        """One step of every running sequence; finished ones leave."""
        sequences = list(self.running)
        drafts = self._draft(sequences)
        pending = [s.pending[: self.prefill_rows] for s in sequences]
        hidden, features = self._verify(sequences, pending, drafts)
        judged = self._judge(sequences, pending, drafts, hidden)
        gains = []
        for index, sequence in enumerate(sequences):
            gain = judged.get(index) or Gain(sequence, [])
            self._commit(gain, len(pending[index]), drafts[index], features[index])
            gains.append(self._end(gain))
        return gains

    def _copy_prefix(self, seat: Seat) -> None:
        """Target and drafter alike: what the donor has verified but not drafted after yet is injected first."""
        if seat.donor is None:
            return
        self.store.copy(seat.donor.slot, seat.slot, seat.reused)
        if self.speculator is not None:
            if seat.donor.injected < seat.reused:
                self.speculator.inject([seat.donor])
            self.speculator.store.copy(seat.donor.slot, seat.slot, seat.reused)

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
        output = self.verify(blocks, spans, self.speculator.target_layer_ids if self.speculator else ())
        if output.features is None:
            return output.hidden, [None] * len(blocks)
        return output.hidden, list(output.features.split([len(block) for block in blocks]))

    def _judge(
        self, sequences: Many[Sequence], pending: list[list[int]], drafts: list[list[int]], hidden: Tensor
    ) -> dict[int, Gain]:
        """What each sequence gains whose prompt is through; the others' rows need no logits."""
        heads = [i for i, s in enumerate(sequences) if len(pending[i]) == len(s.pending)]
        if not heads:
            return {}
        rows = last_rows(pending, drafts, heads)
        logits = self.target.logits(hidden if rows is None else hidden[rows])
        gains = judge([sequences[i] for i in heads], [drafts[i] for i in heads], logits)
        return dict(zip(heads, gains, strict=True))

    def _commit(self, gain: Gain, pending: int, draft: list[int], features: Tensor | None) -> None:
        """Keeps the K/V and features of the rows that stand: the pending tokens and the accepted drafted ones."""
        sequence, accepted = gain.sequence, max(0, len(gain.token_ids) - 1)
        if sequence.is_decoding:
            self._record(sequence, 1 + len(draft), accepted)
        sequence.verified += pending + accepted
        sequence.token_ids += gain.token_ids
        if features is not None and self.speculator is not None:
            # A copy: a view would keep the features of the whole batch alive until the next draft.
            sequence.features.append(features[: pending + accepted].clone())
            if sequence.verified - sequence.injected >= BACKLOG:
                self.speculator.inject([sequence])

    def _record(self, sequence: Sequence, width: int, accepted: int) -> None:
        sequence.statistics.record(width, accepted)
        self.statistics.record(width, accepted)
        sequence.steps.append((width, accepted))
        self.policy.observe(sequence.id, width, accepted)

    def _end(self, gain: Gain) -> Gain:
        """The gain up to what ends the answer; sets the finish_reason and lets a finished sequence go."""
        sequence = gain.sequence
        count = answer_length(sequence, gain.token_ids, self.target.config.eos_token_ids)
        sequence.cut(len(gain.token_ids) - count)
        if sequence.finish_reason is None and sequence.failure is None and sequence.remaining <= 0:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None or sequence.failure is not None:
            self.leave(sequence)
        return gain.first(count)

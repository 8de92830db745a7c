"""The passes of target and drafter: ragged on a CPU; on a GPU, decoding steps are padded to few shapes and captured."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from dflash_serve.drafter.kv_store import KVStore, Span, span_positions
from dflash_serve.drafter.model import Drafter

from .attention import ragged_attention
from .padded_attention import PaddedAttention
from .shapes import Shape, padded_table, real_rows, shape_of
from .static_pass import StaticPass
from .target.model import TargetModel, TargetOutput


class TargetPass:
    """The target over ragged batches.

    Args:
        widest: most rows of a sequence in a decoding step, B.
        static: pad and capture decoding steps; None = on a GPU.
    """

    def __init__(self, target: TargetModel, store: KVStore, widest: int, *, static: bool | None = None) -> None:
        self.target, self.store, self.widest = target, store, widest
        self.static = _prepared(store, static)
        self.captured: dict[tuple[Shape, tuple[int, ...]], StaticPass] = {}

    def __call__(self, rows: Many[list[int]], spans: Many[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        """Token ids of each span's rows -> hidden [rows, H] and features [rows, F*H]; K/V goes into the store."""
        shape = _shape(self.store, spans, self.widest) if self.static else None
        if shape is None:
            token_ids = torch.tensor([token for row in rows for token in row], device=self.target.device)
            return self._run(token_ids, spans, layer_ids)
        table = torch.tensor(padded_table(spans, rows, shape)).to(self.target.device, non_blocking=True)
        key = (shape, layer_ids)
        if key not in self.captured:
            self.captured[key] = StaticPass(lambda table: self._work(table, shape, layer_ids), [table])
        hidden, *features = self.captured[key](table)
        kept = real_rows(spans, shape)
        return TargetOutput(_rows(hidden, kept), _rows(features[0], kept) if features else None)

    def _run(self, token_ids: Tensor, spans: Many[Span], layer_ids: tuple[int, ...]) -> TargetOutput:
        config = self.target.config
        attend = ragged_attention(self.store, spans, config.layers, config.num_attention_heads)
        output: TargetOutput = self.target(token_ids, span_positions(spans, self.target.device), attend, layer_ids)
        return output

    def _work(self, table: Tensor, shape: Shape, layer_ids: tuple[int, ...]) -> tuple[Tensor, ...]:
        config = self.target.config
        positions = _positions(table, shape)
        attend = PaddedAttention(
            self.store, table[:, 0], positions, shape.length, config.layers, config.num_attention_heads
        )
        output = self.target(table[:, 2:].reshape(-1), positions.reshape(-1), attend, layer_ids)
        return (output.hidden,) if output.features is None else (output.hidden, output.features)


class DrafterPass:
    """A drafter over blocks [anchor, mask x (B-1)] of any number of sequences.

    Args:
        embedding: the target's [vocabulary, H].
        store: the drafter's context K/V.
        static: as for the target.
    """

    def __init__(self, embedding: Tensor, store: KVStore, block_size: int, *, static: bool | None = None) -> None:
        self.embedding, self.store, self.block_size = embedding, store, block_size
        self.static = _prepared(store, static)
        self.captured: dict[tuple[Drafter, Shape], StaticPass] = {}

    def __call__(self, drafter: Drafter, anchors: list[int], starts: Many[tuple[int, int]]) -> Tensor:
        """Anchors, and (slot, position) of each -> hidden [sequences * B, H]; their K/V lands behind the context."""
        spans = [Span(slot, start, self.block_size) for slot, start in starts]
        shape = _shape(self.store, spans, self.block_size) if self.static else None
        if shape is None:
            return self._run(drafter, torch.tensor(anchors, device=self.embedding.device), spans)
        table = torch.tensor(padded_table(spans, [[anchor] for anchor in anchors], shape)).to(self.embedding.device)
        key = (drafter, shape)
        if key not in self.captured:
            self.captured[key] = StaticPass(lambda table: self._work(drafter, table, shape), [table])
        return _rows(self.captured[key](table)[0], real_rows(spans, shape))

    def _run(self, drafter: Drafter, anchors: Tensor, spans: Many[Span]) -> Tensor:
        config = drafter.config
        noise = drafter.noise(anchors, self.embedding, self.block_size)
        attend = ragged_attention(self.store, spans, config.layers, config.num_attention_heads)
        hidden: Tensor = drafter(noise, span_positions(spans, noise.device), attend)
        return hidden

    def _work(self, drafter: Drafter, table: Tensor, shape: Shape) -> tuple[Tensor, ...]:
        config, positions = drafter.config, _positions(table, shape)
        noise = drafter.noise(table[:, 2], self.embedding, self.block_size)
        attend = PaddedAttention(
            self.store, table[:, 0], positions, shape.length, config.layers, config.num_attention_heads
        )
        return (drafter(noise, positions.reshape(-1), attend),)


def _prepared(store: KVStore, static: bool | None) -> bool:
    """Whether passes are static; a store that will be read beyond what was written must hold numbers, not NaN."""
    static = store.keys.device.type == "cuda" if static is None else static
    if static:
        store.keys.zero_()
        store.values.zero_()
    return static


def _shape(store: KVStore, spans: Many[Span], widest: int) -> Shape | None:
    return shape_of(spans, slots=store.slots, widest=widest, capacity=store.capacity)


def _positions(table: Tensor, shape: Shape) -> Tensor:
    """[N, W] from the table's starts."""
    return table[:, 1:2] + torch.arange(shape.width, device=table.device)


def _rows(tensor: Tensor, kept: list[int] | None) -> Tensor:
    return tensor if kept is None else tensor[kept]

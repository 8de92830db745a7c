"""The blocks of one training step: sequences and anchors, attention, the drafter's pass over them, and their labels.

Sequences and anchors are functions of seed and step alone, so that a resumed run is the same run. A block sees its own
context and itself, and nothing of other blocks. Slots are predicted by teacher forcing: a Markov head reads the right
token before each slot, as it reads it in decoding for as long as the slots before are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.models.attention import Attend
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.target import TargetModel

if TYPE_CHECKING:
    from dflash_serve.models.drafter_heads import MarkovHead
    from dflash_serve.training.other_target import OtherTarget

log = logging.getLogger(__name__)
Function = Callable[..., Any]
Result = TypeVar("Result")
CONTEXT_STEP = 32  # context rows come in multiples of it, so that shapes recur
ContextKV = tuple[Tensor, Tensor]
"""Keys and values of the flat context rows, each [rows, layers, kv_heads, head_dim] (`Drafter.context_kv`)."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a step; flat rows are [blocks of sequence 0, of sequence 1, ...], B rows a block.

    Attributes:
        block_size: rows of a block, here B; an anchor-first drafter has one less.
        anchors: positions int64 [blocks]; anchor_ids: their tokens int64 [blocks].
        positions: int64 [blocks * B], anchor .. anchor + B - 1.
        counts: blocks of each sequence; contexts: context rows of each, at positions 0 .. contexts - 1.
        targets: token ids int64 [blocks, B-1] of slots 1..B-1; valid: bool, False behind the sequence's end. It stays
            on the CPU, because it decides sizes: a size that is read from a GPU waits for it.
    """

    block_size: int
    anchors: Tensor
    anchor_ids: Tensor
    positions: Tensor
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    targets: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> Blocks:
        """A copy whose tensors are on a device, except `valid`, which stays on the CPU."""
        moved = {name: getattr(self, name).to(device) for name in ("anchors", "anchor_ids", "positions", "targets")}
        return replace(self, **moved)

    def context_visible(self, kind: AttentionKind) -> list[Tensor]:
        """A sequence's bool [blocks, B or 1, context rows]: features strictly before the anchor, within the window."""
        out = []
        for anchors, rows in zip(self.anchors.split(self.counts), self.contexts, strict=True):
            keys = torch.arange(rows, device=anchors.device)
            visible = (keys < anchors[:, None])[:, None]
            if kind.window is not None:
                queries = anchors[:, None] + torch.arange(self.block_size, device=anchors.device)
                visible = visible & (queries[:, :, None] - keys < kind.window)
            out.append(visible)
        return out

    def block_visible(self, kind: AttentionKind) -> Tensor:
        """Bool [B, B]: True if a slot of a block sees another."""
        slots = torch.arange(self.block_size, device=self.anchors.device)
        distance = slots[:, None] - slots
        visible = distance >= 0 if kind.causal else torch.ones_like(distance, dtype=torch.bool)
        return visible if kind.window is None else visible & (distance.abs() < kind.window)


def step_sequences(seed: int, step: int, count: int, per_step: int) -> list[tuple[int, int]]:
    """(epoch, index) of the sequences of a step; epochs follow one another without a gap."""
    epochs: dict[int, Sequence[int]] = {}
    chosen = []
    for place in range(step * per_step, (step + 1) * per_step):
        epoch, offset = divmod(place, count)
        if epoch not in epochs:
            epochs[epoch] = torch.randperm(count, generator=_generator(seed, epoch, 0)).tolist()
        chosen.append((epoch, epochs[epoch][offset]))
    return chosen


def draw_anchors(seed: int, epoch: int, index: int, *, first: int, length: int, count: int) -> Tensor:
    """Sorted anchors int64 [<= count] among the answer's positions first .. length-2, without repetition.

    The last position is not an anchor, because nothing follows it. `first` is the answer's first token, which prefill
    has sampled but the target has not read, as after every verification.
    """
    candidates = torch.arange(first, length - 1)
    chosen = torch.randperm(len(candidates), generator=_generator(seed, epoch, index + 1))[:count]
    return candidates[chosen].sort().values


def _generator(seed: int, epoch: int, index: int) -> torch.Generator:
    # one for every (seed, epoch, index), so that the order of the calls does not matter
    mixed = ((seed * 1_000_003 + epoch) * 1_000_003 + index) & 0x7FFF_FFFF_FFFF_FFFF
    return torch.Generator().manual_seed(mixed)


def lay_out(sequences: Sequence[Tensor], anchors: Sequence[Tensor], block_size: int, rows: int | None = None) -> Blocks:
    """Blocks of sequences' token ids (int64 [length] each) at the given anchors (int64 [count] each), all on the CPU.

    Args:
        rows: rows of a block in the drafter's input: B, or B - 1 for anchor-first slots; None = B.
    """
    ids, targets, valid = [], [], []
    ahead = torch.arange(1, block_size, device=sequences[0].device)
    for tokens, starts in zip(sequences, anchors, strict=True):
        places = starts[:, None] + ahead
        valid.append(places < len(tokens))
        targets.append(tokens[places.clamp(max=len(tokens) - 1)])
        ids.append(tokens[starts])
    starts = torch.cat(list(anchors))
    own = torch.arange(rows or block_size, device=starts.device)
    return Blocks(
        block_size=len(own),
        anchors=starts,
        anchor_ids=torch.cat(ids),
        positions=(starts[:, None] + own).flatten(),
        targets=torch.cat(targets),
        valid=torch.cat(valid),
        counts=tuple(len(a) for a in anchors),
        contexts=tuple(-(-int(a.max()) // CONTEXT_STEP) * CONTEXT_STEP for a in anchors),
    )


class BlockAttention:
    """Softmax over two parts, context and own block, in plain products. An `Attend`.

    A dense mask over all blocks would spend most of its keys on other blocks: on 2 cores with AMX (64 blocks of 8, 300
    context rows, 9/3 heads x 64, bf16) SDPA with that mask took 4.2 + 17.3 ms forward + backward, this 3.9 + 6.3.
    """

    def __init__(self, blocks: Blocks, context: ContextKV, kinds: Sequence[AttentionKind], dtype: torch.dtype) -> None:
        self.blocks, self.kinds = blocks, kinds
        # Unbound once: a slice a layer would cost a gradient of the whole tensor a layer.
        self.context = [[per_layer.split(blocks.contexts) for per_layer in part.unbind(1)] for part in context]
        self.masks = {
            kind: (
                [_additive(visible, dtype) for visible in blocks.context_visible(kind)],
                _additive(blocks.block_visible(kind), dtype),
            )
            for kind in set(kinds)
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [count * self.blocks.block_size for count in self.blocks.counts]
        context_k, context_v = (part[layer] for part in self.context)
        context_masks, block_mask = self.masks[self.kinds[layer]]
        size = self.blocks.block_size
        parts = zip(q.split(rows), k.split(rows), v.split(rows), context_k, context_v, context_masks, strict=True)
        return torch.cat([_attend(a, b, c, (ck, cv), seen, block_mask, size) for a, b, c, ck, cv, seen in parts])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], context_mask: Tensor, block_mask: Tensor, size: int
) -> Tensor:
    """One sequence: q [A*B, heads, D]; k, v [A*B, kv_heads, D]; context k, v [C, kv_heads, D] -> like q."""
    context_k, context_v = context
    heads, dim = q.shape[1:]
    kv_heads, rows = k.shape[1], len(context_k)
    groups, blocks = heads // kv_heads, len(q) // size
    # [kv_heads, A, groups * B, D]: the query heads that share a key head are more rows of it.
    queries = q.view(blocks, size, kv_heads, groups, dim).permute(2, 0, 3, 1, 4).reshape(kv_heads, blocks, -1, dim)
    queries = queries * dim**-0.5
    keys, values = (x.view(blocks, size, kv_heads, dim).permute(2, 0, 1, 3) for x in (k, v))
    to_context = queries.reshape(kv_heads, -1, dim) @ context_k.permute(1, 2, 0)
    to_context = to_context.view(kv_heads, blocks, groups, -1, rows)
    to_block = (queries @ keys.transpose(-1, -2)).view(kv_heads, blocks, groups, size, size)
    scores = torch.cat([to_context + context_mask[:, None], to_block + block_mask], dim=-1)
    weights = scores.softmax(-1).to(values.dtype).view(kv_heads, blocks, -1, rows + size)
    out = (weights[..., :rows].reshape(kv_heads, -1, rows) @ context_v.transpose(0, 1)).view_as(queries)
    out = out + weights[..., rows:] @ values
    return out.view(kv_heads, blocks, groups, size, dim).permute(1, 3, 0, 2, 4).reshape(-1, heads, dim)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))


class Compiled:
    """A function through `torch.compile`. From its first failure on the plain function runs, and one log line says so.

    Args:
        wanted: False = the plain function from the beginning.
        backend: of `torch.compile`.
    """

    def __init__(self, plain: Function, *, wanted: bool, backend: str | Function = "inductor") -> None:
        self.plain = plain
        self.fast = torch.compile(plain, dynamic=True, backend=backend) if wanted else None

    def run(self, use: Callable[[Function], Result]) -> Result:
        """Calls `use` with the compiled function, and again with the plain one if that fails."""
        if self.fast is not None:
            try:
                return use(self.fast)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the compiler's exceptions have no class in common
                why = " ".join(str(error).split())[:200]
                log.warning("%s is not compiled: %s", self.plain.__qualname__, why)
                self.fast = None
        return use(self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(lambda function: function(*args, **kwargs))


class Flex(NamedTuple):
    """FlexAttention, and the function that makes its masks."""

    attention: Function
    mask: Function


class FlexBlockAttention:
    """`BlockAttention` through FlexAttention, which skips hidden tiles and keeps no scores.

    A sequence at a time: making the mask looks at every pair of a row and a key, and those of different sequences never
    see each other. Its values are tested against `BlockAttention` on CPU (forward only); it has not been run on a GPU
    yet.
    """

    def __init__(self, blocks: Blocks, context: ContextKV, kinds: Sequence[AttentionKind], flex: Flex) -> None:
        self.kinds, self.flex = kinds, flex
        self.rows = [count * blocks.block_size for count in blocks.counts]
        self.context = [[per_layer.split(blocks.contexts) for per_layer in part.unbind(1)] for part in context]
        self.masks = {kind: _flex_masks(blocks, kind, flex) for kind in set(kinds)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context_k, context_v = (part[layer] for part in self.context)
        parts = (q.split(self.rows), k.split(self.rows), v.split(self.rows), context_k, context_v)
        outs = []
        for a, b, c, ck, cv, mask in zip(*parts, self.masks[self.kinds[layer]], strict=True):
            queries, keys, values = (x.transpose(0, 1)[None] for x in (a, torch.cat([ck, b]), torch.cat([cv, c])))
            out = self.flex.attention(queries, keys, values, block_mask=mask, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


def _flex_masks(blocks: Blocks, kind: AttentionKind, flex: Flex) -> list[Any]:
    """FlexAttention's mask of each sequence; its keys are context rows, then block rows, its queries block rows."""
    size, masks = blocks.block_size, list[Any]()
    positions = blocks.positions.split([count * size for count in blocks.counts])
    for anchors, own, context in zip(blocks.anchors.split(blocks.counts), positions, blocks.contexts, strict=True):
        visible = _flex_mask(anchors.repeat_interleave(size), own, context, size, kind)
        masks.append(flex.mask(visible, None, None, len(own), context + len(own), device=str(own.device)))
    return masks


def _flex_mask(anchors: Tensor, positions: Tensor, context: int, size: int, kind: AttentionKind) -> Function:
    # Anchors and positions of each row. Tables, because the compiler cannot divide an index (torch 2.13).
    rows = torch.arange(len(positions), device=positions.device)
    blocks = rows // size
    key_blocks = torch.cat([blocks.new_full((context,), -1), blocks])
    key_positions = torch.cat([torch.arange(context, device=positions.device), positions])

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key < anchors[query]) | (key_blocks[key] == blocks[query])
        distance = positions[query] - key_positions[key]
        if kind.causal:
            seen = seen & (distance >= 0)
        return seen if kind.window is None else seen & (distance.abs() < kind.window)

    return visible


def compiled_flex(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> Flex | None:
    """FlexAttention, once a trial forward and backward succeeded; None = plain products attend, as a log line says."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention, mask = Compiled(flex_attention, wanted=True), Compiled(create_block_mask, wanted=True)
    tokens, anchors = torch.zeros(CONTEXT_STEP, dtype=torch.int64), torch.tensor([8, 20])
    blocks, heads = lay_out([tokens], [anchors], config.block_size).to(device), config.num_attention_heads
    rows = torch.zeros(len(blocks.positions), heads, config.head_dim, device=device, dtype=dtype, requires_grad=True)
    own = rows[:, : config.num_key_value_heads]
    context = own.new_zeros(CONTEXT_STEP, 1, *own.shape[1:])

    def trial(function: Function) -> None:
        if attention.fast is not None:
            attend = FlexBlockAttention(blocks, (context, context), config.layers[:1], Flex(function, mask))
            attend(0, rows, own, own).sum().backward()

    attention.run(trial)
    return None if attention.fast is None else Flex(attention.fast, mask)


class Predictions(NamedTuple):
    """Predictions of slots 1..B-1. Logits are hidden @ head.T, plus latent @ bias.T with a Markov head.

    Attributes:
        hidden: [blocks, B-1, H] after the final norm; latent: [blocks, B-1, r]; bias: [vocabulary, r].
        confidence: logits [blocks, B-1]; None = no such head.
    """

    hidden: Tensor
    latent: Tensor | None = None
    bias: Tensor | None = None
    confidence: Tensor | None = None


class Labels(NamedTuple):
    """Labels of slots 1..B-1: token ids int64 [blocks, B-1] and if they count, which is on the CPU.

    With soft labels also the target's hidden states [blocks, B-1, H] after the final norm.
    """

    targets: Tensor
    valid: Tensor
    teacher: Tensor | None = None


class SlotForward:
    """Runs a drafter over `Blocks`. Heads compute in fp32: they are small.

    Args:
        embedding: the target's table [vocabulary, H].
        dtype: of the backbone's computation; the drafter's own weights stay fp32 and are rounded once a step.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, *, dtype: torch.dtype) -> None:
        self.drafter, self.dtype, self.backbone = drafter, dtype, _Backbone(drafter, embedding.to(dtype))

    def __call__(self, blocks: Blocks, features: Sequence[Tensor]) -> Predictions:
        """Predictions of slots 1..B-1.

        Args:
            features: [length, F*H] of each sequence; no row from its last anchor on is seen.
        """
        # Rounded weights rather than autocast: that keeps the norms in fp32 and casts at every border between the two,
        # which on a CPU costs as much as the products.
        rounded = {name: weight.to(self.dtype) for name, weight in self.backbone.named_parameters()}
        pairs = zip(features, blocks.contexts, strict=True)  # zeros behind a sequence's end, which no block sees
        rows = torch.cat([F.pad(f[:count], (0, 0, 0, max(0, count - len(f)))) for f, count in pairs])
        hidden: Tensor = functional_call(self.backbone, rounded, (blocks, rows.to(self.dtype)))
        hidden = hidden.view(len(blocks.anchors), blocks.block_size, -1)[:, self.drafter.config.first_row :]
        markov, confidence = self.drafter.markov_head, self.drafter.confidence_head
        previous = torch.cat([blocks.anchor_ids[:, None], blocks.targets[:, :-1]], dim=1)
        found = Predictions(hidden)
        if markov is not None:
            found = found._replace(latent=_latents(markov, previous, hidden), bias=markov.markov_w2.weight)
        if confidence is not None:
            known = markov.markov_w1(previous) if markov is not None and confidence.with_markov else None
            found = found._replace(confidence=confidence(hidden.float(), known))
        return found


class _Backbone(nn.Module):
    # a module of its own, so that `functional_call` can run all of the pass with rounded weights
    def __init__(self, drafter: Drafter, embedding: Tensor) -> None:
        super().__init__()
        self.drafter, self.flex = drafter, None
        if embedding.is_cuda:
            self.flex = compiled_flex(drafter.config, embedding.device, embedding.dtype)
        self.embedding = (embedding,)  # in a tuple, so that it is neither trained nor moved

    def forward(self, blocks: Blocks, features: Tensor) -> Tensor:
        """features [sum of contexts, F*H] -> hidden states [blocks * B, H] after the final norm."""
        drafter, size = self.drafter, blocks.targets.shape[1] + 1
        positions = torch.cat([torch.arange(rows, device=features.device) for rows in blocks.contexts])
        context = drafter.context_kv(drafter.project_context(features), positions)
        attend: Attend
        if self.flex is None:
            attend = BlockAttention(blocks, context, drafter.config.layers, context[0].dtype)
        else:
            attend = FlexBlockAttention(blocks, context, drafter.config.layers, self.flex)
        noise = drafter.noise(blocks.anchor_ids, self.embedding[0], size)
        hidden: Tensor = drafter(noise, blocks.positions, attend, size)
        return hidden


def _latents(markov: MarkovHead, previous: Tensor, hidden: Tensor) -> Tensor:
    """[blocks, B-1, r] of every slot after the tokens `previous` [blocks, B-1], from left to right."""
    latents, state = [], None
    for token, rows in zip(previous.unbind(1), hidden.unbind(1), strict=True):
        latent, state = markov.latent(token, rows.float(), state)
        latents.append(latent)
    return torch.stack(latents, dim=1)


class Teacher:
    """The target's part in a step: the drafter's features, and the labels.

    Args:
        soft: labels include the target's distributions, so its last layer's outputs are one more feature.
    """

    def __init__(self, target: TargetModel | OtherTarget, config: DrafterConfig, *, soft: bool) -> None:
        self.target, self.soft, self.own = target, soft, config.feature_size
        self.layer_ids = config.target_layer_ids + ((target.config.num_layers - 1,) if soft else ())

    @torch.no_grad()
    def __call__(self, blocks: Blocks, features: Sequence[Tensor]) -> tuple[list[Tensor], Labels]:
        """The drafter's features of each sequence, and the labels.

        Args:
            features: [length, F*H] of each sequence, of `layer_ids`.
        """
        teacher = None
        if self.soft:
            ahead = torch.arange(blocks.targets.shape[1], device=blocks.anchors.device)
            pairs = zip(features, blocks.anchors.split(blocks.counts), strict=True)
            rows = [rows[(at[:, None] + ahead).clamp(max=len(rows) - 1), self.own :] for rows, at in pairs]
            teacher = self.target.norm(torch.cat(rows))
        return [rows[:, : self.own] for rows in features], Labels(blocks.targets, blocks.valid, teacher)

"""The drafter: a small block-diffusion transformer that fills a whole block of masked slots in one pass.

Paper (arXiv 2602.06036) section 4; reference `dflash/model.py` (dflash 0.1.0). Parameter names are z-lab's:
`fc`, `hidden_norm`, `layers.N.*`, `norm`. Embedding and head are the target's and stay with the caller, and so does the
context K/V: the drafter returns its keys and values (`context_kv`) and asks the caller to attend (`Attend`), so that
one model serves a preallocated cache, a paged pool, an engine's own buffers and the training mask.

Hidden states become tokens by `propose`. Plain DFlash takes each slot's argmax. With a Markov head or a candidate
selector a slot depends on the token before it: a `Walk` chooses from left to right, for all blocks at once. Each choice
is an argmax at every temperature, so a draft is a point mass and sampling stays lossless with any width
(`speculation.acceptance`). A grammar filters a slot's scores before the choice.

A drafter's folder may list frequent tokens (`hot_tokens.json`): then only their rows of the target's head, and of a
Markov head's biases, are read (`HotHead`). The target verifies a draft by its whole head, so no answer changes; a token
that training never showed the drafter is little loss (FR-Spec, arXiv 2502.14856; for EAGLE, SGLang has
`--speculative-token-map`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from dflash_serve.checkpoint.config import PLAIN_DRAFTER, DrafterConfig
from dflash_serve.checkpoint.source import HOT_TOKENS
from dflash_serve.common.documents import CONFIG, read_bytes
from dflash_serve.common.files import write_whole
from dflash_serve.errors import UserError
from dflash_serve.models.attention import Attend, PlainOperators, ProjectedAttention, ragged_attention
from dflash_serve.models.drafter_heads import CandidateSelector, ConfidenceHead, GroupedConvolution, MarkovHead
from dflash_serve.models.kv_cache import KVCache, Span, to_device
from dflash_serve.models.layers import (
    CompiledLinear,
    RotaryEmbedding,
    as_module_list,
    dense_weight,
    pack_linear,
    rotate,
    rounded,
)

Head = Callable[[Tensor], Tensor]
"""Hidden rows [rows, H] -> logits [rows, vocabulary], by the target's head or the drafter's own."""


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Grouped-query attention with q/k norms. The same k_proj and v_proj serve context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed block rows x [rows, H] -> q [rows, heads, head_dim] and k, v [rows, kv_heads, head_dim], rotated."""
        q = self.q_norm(self.q_proj(x).view(len(x), -1, self.head_dim))
        return rotate(q, cos, sin), *self.key_value(x, cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, H], a normed block row or a context row -> rotated keys and values [rows, kv_heads, head_dim]."""
        keys = rotate(self.k_norm(self.k_proj(x).view(len(x), -1, self.head_dim)), cos, sin)
        return keys, self.v_proj(x).view(len(x), -1, self.head_dim)


class Layer(nn.Module):
    """Pre-norm decoder layer; the norms apply to the block only, never to the context."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: int) -> Tensor:
        x = self.input_layernorm(h)
        q, k, v = self.self_attn.project(x, cos, sin)
        h = h + self.self_attn.o_proj(attend(self.index, q, k, v).reshape(len(h), -1))
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class ConvolvedLayer(Layer):
    """A layer whose attention and MLP each stand between two convolutions over the rows of a block (DFlash2).

    Context keys and values never pass them.
    """

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__(config, index)
        assert config.convolution is not None
        self.attention_conv = GroupedConvolution(config.convolution, config.hidden_size)
        self.mlp_conv = GroupedConvolution(config.convolution, config.hidden_size)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: int) -> Tensor:
        x, coefficients = self.attention_conv.before(self.input_layernorm(h), rows)
        q, k, v = self.self_attn.project(x, cos, sin)
        y = self.self_attn.o_proj(attend(self.index, q, k, v).reshape(len(h), -1))
        h = h + self.attention_conv.after(y, coefficients)
        x, coefficients = self.mlp_conv.before(self.post_attention_layernorm(h), rows)
        return h + self.mlp_conv.after(self.mlp(x), coefficients)


class Drafter(nn.Module):
    """A DFlash drafter over flat rows: a batch of blocks is the concatenation of their rows.

    Parameters are uninitialised until a checkpoint is read or `training` initialises them.

    Raises:
        UserError: the drafter has a part of `Heads.not_embedded`.
    """

    mask_embedding: Tensor | None
    lm_head: nn.Module | None  # the drafter's own head [Vd, H], with a reduced draft vocabulary
    d2t: Tensor | None  # target id - draft id, int64 [Vd]
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    candidate_selector: CandidateSelector | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        if config.not_embedded is not None:
            raise UserError(config.not_embedded, where="drafter", do=PLAIN_DRAFTER)
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        kind = Layer if config.convolution is None else ConvolvedLayer
        self.layers = as_module_list(kind(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        self.operators = PlainOperators()
        shape = torch.empty(config.hidden_size) if config.has_mask_embedding else None
        self.register_parameter("mask_embedding", None if shape is None else nn.Parameter(shape))
        hidden, vocab, reduced = config.hidden_size, config.vocab_size, config.draft_vocabulary
        self.lm_head = None if reduced is None else nn.Linear(hidden, reduced, bias=False)
        self.register_buffer("d2t", None if reduced is None else torch.empty(reduced, dtype=torch.int64))
        self.token_ids: Tensor | None = None
        """Target ids int64 [Vd] of the draft ids, with a reduced draft vocabulary; set by `map_tokens`."""
        self.hot_tokens: list[int] | None = None
        """Target ids that are drafted, by rows of the target's head (`HotHead`); None = all."""
        self.markov_head = self.confidence_head = self.candidate_selector = None
        if config.markov is not None:
            self.markov_head = MarkovHead(config.markov, hidden, vocab, reduced or vocab)
        if config.confidence is not None:
            self.confidence_head = ConfidenceHead(config.confidence, hidden, config.markov.rank if config.markov else 0)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(config.selector, hidden, vocab)

    def map_tokens(self) -> None:
        """Computes `token_ids` after the weights are loaded."""
        if self.d2t is not None:
            self.token_ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids of the drafter's head -> target ids."""
        return draft_ids if self.token_ids is None else self.token_ids[draft_ids]

    def project_context(self, features: Tensor) -> Tensor:
        """Context features [rows, F*H] of verified tokens -> the input [rows, H] of every layer's K/V projection."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of projected context rows in all layers, each [rows, layers, kv_heads, head_dim].

        Args:
            context: [rows, H] from `project_context`.
            positions: int [rows], the tokens' positions in their sequences.
        """
        cos, sin = self.rotary(positions)
        pairs = [layer.self_attn.key_value(context, cos, sin) for layer in self.layers]
        return torch.stack([k for k, _ in pairs], dim=1), torch.stack([v for _, v in pairs], dim=1)

    def noise(self, anchors: Tensor, embedding: Tensor, block_size: int | None = None) -> Tensor:
        """Input rows [blocks * rows, H] of blocks [anchor, mask, ...], in the embedding's dtype.

        A block has B rows, and B - 1 where slots are anchor-first (`DrafterConfig.rows`).

        Args:
            anchors: token ids [blocks], the last verified token of each sequence.
            embedding: the target's embedding table [vocabulary, H].
            block_size: B, if smaller than the drafter was trained for.
        """
        block, size = self.config.rows(block_size), self.config.hidden_size
        mask = self.mask_embedding
        if mask is None:
            assert self.config.mask_token_id is not None
            mask = embedding[self.config.mask_token_id]
        rows = mask.to(embedding.dtype).expand(len(anchors), block, size).clone()
        rows[:, 0] = F.embedding(anchors, embedding)
        return rows.view(-1, size) * self.config.embedding_scale

    def forward(self, noise: Tensor, positions: Tensor, attend: Attend, block_size: int | None = None) -> Tensor:
        """Hidden states [rows, H]; row j of a block predicts the token AT its position, or after it (anchor-first).

        Args:
            noise: [rows, H], the input embeddings (`noise`).
            positions: int [rows].
            attend: attention over context and block.
            block_size: as in `noise`.
        """
        cos, sin = self.rotary(positions)
        h, rows = noise, self.config.rows(block_size)
        for layer in self.layers:
            h = layer(h, cos, sin, attend, rows)
        out: Tensor = self.norm(h)
        return out

    def attention(self, cache: KVCache, spans: Sequence[Span]) -> Attend | ProjectedAttention:
        """Attention of blocks over their contexts, for one step."""
        return ragged_attention(cache, spans, self.config.layers, self.config.num_attention_heads)

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """The target head's logits of drafter rows -> the drafter's own: multiplier, then soft-cap."""
        logits = logits * self.config.output_multiplier if self.config.output_multiplier != 1.0 else logits
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class SlotFilter(Protocol):
    """A restriction of the tokens in a block's slots, such as a grammar."""

    def fill(self, slots: int, choose: Callable[[Sequence[int], Tensor], int]) -> list[int]:
        """A draft of at most `slots` tokens; `choose` gives the best allowed token (bool [V]) after a draft."""


def propose(
    drafter: Drafter,
    head: Head,
    hidden: Tensor,
    anchors: Sequence[int],
    counts: Sequence[int],
    filters: Sequence[SlotFilter | None],
) -> list[list[int]]:
    """Drafted tokens of each block; a filter may end one early.

    A block under a filter is walked alone. The others are drafted together; where slots depend on one another, they are
    walked together, padded to the most slots.

    Args:
        head: the target's, for a drafter that has none of its own.
        hidden: [sum of counts, H], after the final norm: the rows of each block's slots 1, 2, ...
        anchors: the blocks' anchors, target ids.
        counts: slots wanted of each block, 1 at least.
        filters: of each block; None = everything is allowed.
    """
    if min(counts) == max(counts) and all(grammar is None for grammar in filters):
        rows, first = hidden.unflatten(0, (len(counts), counts[0])), to_device(anchors, hidden.device)
        chosen: list[list[int]] = propose_blocks(drafter, head, rows, first).tolist()
        return chosen
    logits = drafter.adjust_logits((drafter.lm_head or head)(hidden))
    ends = list(accumulate(counts))
    blocks = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    drafts: list[list[int]] = [[] for _ in counts]
    free = [index for index, grammar in enumerate(filters) if grammar is None]
    if free and drafter.markov_head is None and drafter.candidate_selector is None:
        tokens = _likeliest(drafter, head, logits).tolist()
        for index in free:
            drafts[index] = tokens[blocks[index]]
    elif free:
        most = max(counts[index] for index in free)  # a block with fewer slots repeats its last one
        places = [[blocks[i].start + min(slot, counts[i] - 1) for slot in range(most)] for i in free]
        rows, first = to_device(places, hidden.device), to_device([anchors[i] for i in free], hidden.device)
        path = Walk(drafter, head, hidden[rows], logits[rows]).whole_path(first)
        for index, tokens in zip(free, path.tolist(), strict=True):
            drafts[index] = tokens[: counts[index]]
    for index, grammar in enumerate(filters):
        if grammar is not None:
            walk = Walk(drafter, head, hidden[None, blocks[index]], logits[None, blocks[index]])
            drafts[index] = grammar.fill(counts[index], partial(walk.choose_next, anchors[index]))
    return drafts


def propose_blocks(drafter: Drafter, head: Head, hidden: Tensor, anchors: Tensor) -> Tensor:
    """Drafted tokens [n, slots] of blocks with equally many slots and no filter; nothing waits for the device.

    Args:
        head: the target's, for a drafter that has none of its own.
        hidden: [n, slots, H], after the final norm.
        anchors: target ids [n].
    """
    logits = drafter.adjust_logits((drafter.lm_head or head)(hidden.flatten(0, 1)))
    if drafter.markov_head is None and drafter.candidate_selector is None:
        return _likeliest(drafter, head, logits).view(hidden.shape[:2])
    return Walk(drafter, head, hidden, logits.unflatten(0, hidden.shape[:2])).whole_path(anchors)


def _likeliest(drafter: Drafter, head: Head, logits: Tensor) -> Tensor:
    found = logits.argmax(dim=-1)
    return head.token_ids[found] if isinstance(head, HotHead) else drafter.target_ids(found)


class Walk:
    """One walk over the slots of n blocks: each slot is chosen by its own logits and by the token before it.

    Args:
        drafter: the owner of the Markov head or selector.
        head: made the logits, where the drafter has no head of its own.
        hidden: [n, slots, H] after the final norm.
        logits: [n, slots, Vd] of the drafter; of a `HotHead`'s tokens alone, which no grammar filters.
    """

    def __init__(self, drafter: Drafter, head: Head, hidden: Tensor, logits: Tensor) -> None:
        self.drafter, self.head, self.hidden, self.logits = drafter, head, hidden, logits
        self.state: Tensor | None = None  # of a Markov head

    def choose(self, slot: int, previous: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Target ids [n] for a slot; called for the slots in order.

        Args:
            slot: from 0.
            previous: target ids [n] of the slot before; the anchors at the first.
            allowed: bool [V], tokens that a grammar allows here; None = all.
        """
        drafter, hidden, scores = self.drafter, self.hidden[:, slot], self.logits[:, slot]
        if drafter.markov_head is not None:
            latent, self.state = drafter.markov_head.latent(previous, hidden, self.state)
            hot = self.head.biases if isinstance(self.head, HotHead) else None
            scores = scores + (hot or drafter.markov_head.markov_w2)(latent)
        if allowed is not None:
            draftable = allowed if drafter.token_ids is None else allowed[drafter.token_ids]  # bool [Vd]
            scores = scores.masked_fill(~draftable, -torch.inf)
        if drafter.candidate_selector is not None:
            return drafter.candidate_selector.best(scores, previous, hidden)
        return _likeliest(drafter, self.head, scores)

    def whole_path(self, anchors: Tensor) -> Tensor:
        """Target ids [n, slots] of all slots of each block, from anchors [n]."""
        previous, path = anchors, []
        for slot in range(self.hidden.shape[1]):
            previous = self.choose(slot, previous)
            path.append(previous)
        return torch.stack(path, dim=1)

    def choose_next(self, anchor: int, draft: Sequence[int], allowed: Tensor) -> int:
        """The best allowed token after a draft of one block: `SlotFilter.fill`'s `choose`."""
        previous = torch.tensor([draft[-1] if draft else anchor], device=self.hidden.device)
        return int(self.choose(len(draft), previous, allowed.to(self.hidden.device)))


def takes_hot_tokens(config: DrafterConfig) -> bool:
    """Its tokens are chosen by the target's head and biases alone, so that some of their rows make a smaller choice."""
    return config.selector is None and config.draft_vocabulary is None


def read_hot_tokens(folder: Path, vocab_size: int) -> list[int] | None:
    """Target ids from a drafter's folder, rising; None if it has no list.

    Raises:
        UserError: the file holds no rising list of ids of the vocabulary.
    """
    path = folder / HOT_TOKENS
    if not path.exists():
        return None
    try:
        ids = TypeAdapter(list[int]).validate_json(read_bytes(path, CONFIG), strict=True)
    except (UserError, ValidationError):
        ids = []
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        why = f"it holds no rising list of token ids below {vocab_size}"
        raise UserError(why, where=str(path), do="remove it: the drafter then drafts from the whole vocabulary")
    return ids


def write_hot_tokens(folder: Path, token_ids: Sequence[int]) -> None:
    """Writes the list completely or not at all."""
    write_whole(folder / HOT_TOKENS, json.dumps(list(token_ids)) + "\n")


class HotHead:
    """The rows of a target's head for a list of tokens; `propose` turns the rows that it chooses into target ids.

    Args:
        head: of the target, packed or not.
        token_ids: target ids.
        markov: the drafter's Markov head; the rows of these tokens are its `biases`.
    """

    def __init__(self, head: nn.Module, token_ids: Tensor | Sequence[int], markov: MarkovHead | None = None) -> None:
        self.token_ids = torch.as_tensor(token_ids, device=dense_weight(head).device)
        self.linear = self._rows(head)
        self.biases = None if markov is None else self._rows(markov.markov_w2)

    def _rows(self, whole: nn.Module) -> nn.Module:
        rows = dense_weight(whole)[self.token_ids]
        linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(rows, requires_grad=False)
        return rounded(pack_linear(linear, compiled=isinstance(whole, CompiledLinear)))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [rows, H] after the drafter's final norm -> logits [rows, tokens]."""
        out: Tensor = self.linear(hidden)
        return out

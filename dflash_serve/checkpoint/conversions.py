"""Drafters made servable where they are not: a reduced vocabulary made whole, a Markov head added. Needs torch.

Engines differ in what they load: SGLang and TensorRT-LLM know no reduced vocabulary, and no engine but the embedded one
runs DeepSpec's plain drafters (`dflash_*_block7`: anchor-first slots without a Markov head).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.heads import MarkovConfig
from dflash_serve.errors import UserError

Converted = tuple[DrafterConfig, dict[str, Tensor]]
BF16_STEP = 2.0**-7
"""Of one number in bfloat16, relative: two that differ by no more were rounded apart."""
FRESH_STD = 0.02
ROWS_AT_ONCE = 8192


def with_full_vocabulary(config: DrafterConfig, tensors: Mapping[str, Tensor], head: Tensor) -> Converted:
    """The same hidden states with all of the target's tokens to choose from, through the target's own head.

    Only right where the drafter's head is a copy of the target's rows, so each row is compared. A Markov head gives
    the tokens that it never knew no bias.

    Args:
        head: the target's [V, H].

    Raises:
        UserError: the vocabulary is not reduced, the head is not the target's, or rows were trained further.
    """
    where = "--full-vocabulary"
    if config.draft_vocabulary is None:
        raise UserError("the drafter has all of the target's tokens already", where=where, do="leave it out")
    if head.shape != (config.vocab_size, config.hidden_size):
        what = f"the target's head is {list(head.shape)}, the drafter's {[config.vocab_size, config.hidden_size]}"
        raise UserError(what, where="--target", do="give the target that it was trained for")
    ids = torch.arange(config.draft_vocabulary) + tensors["d2t"]
    differing = differing_rows(tensors["lm_head.weight"], head, ids)
    if differing:
        what = f"{differing} of {len(ids)} rows of lm_head are not the target's: they were trained further"
        raise UserError(what, where=where, do="serve it as it is (--backend torch, or vLLM)")
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "d2t")}
    if config.markov is not None:
        known = tensors["markov_head.markov_w2.weight"]
        whole = torch.zeros(config.vocab_size, known.shape[1], dtype=known.dtype)
        whole[ids] = known
        kept["markov_head.markov_w2.weight"] = whole
    return config.model_copy(update={"draft_vocabulary": None}), kept


def differing_rows(own: Tensor, head: Tensor, ids: Tensor) -> int:
    """Rows of the drafter's head [Vd, H] that are not the target's rows `ids`, beyond a rounding to bfloat16."""
    count = 0
    for first in range(0, len(ids), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        mine, theirs = own[part].float(), head[ids[part]].float()
        apart = (mine - theirs).abs() > BF16_STEP * theirs.abs().maximum(mine.abs())
        count += int(apart.any(dim=1).sum())
    return count


def with_markov_head(
    config: DrafterConfig, tensors: Mapping[str, Tensor], *, rank: int, fresh: bool, seed: int = 0
) -> Converted:
    """The same drafts from a drafter with a vanilla Markov head whose bias is zero.

    Args:
        fresh: its first matrix is random, so that it can be trained (`train`, drafter.init); else all is zero.

    Raises:
        UserError: it has a Markov head or a candidate selector already.
    """
    if config.markov is not None or config.selector is not None:
        have = "a Markov head" if config.markov else "a candidate selector"
        raise UserError(f"the drafter has {have} already", where="--markov-head", do="leave it out")
    dtype = tensors["fc.weight"].dtype
    first = torch.zeros(config.vocab_size, rank)
    if fresh:
        first.normal_(std=FRESH_STD, generator=torch.Generator().manual_seed(seed))
    added = {
        "markov_head.markov_w1.weight": first.to(dtype),
        "markov_head.markov_w2.weight": torch.zeros(config.draft_vocabulary or config.vocab_size, rank, dtype=dtype),
    }
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
    markov = MarkovConfig(kind="vanilla", rank=rank)
    return config.model_copy(update={"markov": markov, "confidence": None}), {**kept, **added}

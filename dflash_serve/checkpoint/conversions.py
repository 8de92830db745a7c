"""Changes of a drafter's form. Needs torch.

Engines differ in the forms they load: SGLang and TensorRT-LLM know no reduced vocabulary, and only the embedded engine
runs DeepSpec's plain drafters (`dflash_*_block7`: anchor-first slots without a Markov head).

A reduced draft vocabulary has two maps: `d2t` (int64 [Vd], target id - draft id) and `t2d` (bool [V]).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import MOST_PADDING, DrafterConfig, MarkovConfig, expected_tensors
from dflash_serve.errors import UserError

Converted = tuple[DrafterConfig, dict[str, Tensor]]
BF16_STEP = 2.0**-7  # relative rounding step of bfloat16: a larger difference between two numbers is not rounding
FRESH_STD = 0.02
ROWS_AT_ONCE = 8192


def with_full_vocabulary(config: DrafterConfig, tensors: Mapping[str, Tensor], head: Tensor) -> Converted:
    """A drafter with a reduced vocabulary, made to draft all of the target's tokens through the target's own head.

    This is correct only if the drafter's head is a copy of the target's rows, so each row is compared. Tokens that were
    not in the reduced vocabulary get no bias from a Markov head.

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
    """Number of rows of the drafter's head [Vd, H] that differ from the target's rows `ids` by more than rounding."""
    count = 0
    for first in range(0, len(ids), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        mine, theirs = own[part].float(), head[ids[part]].float()
        apart = (mine - theirs).abs() > BF16_STEP * theirs.abs().maximum(mine.abs())
        count += int(apart.any(dim=1).sum())
    return count


def without_padding(config: DrafterConfig, tensors: Mapping[str, Tensor], vocab_size: int) -> Converted:
    """A drafter whose vocabulary is padded beyond its target's `vocab_size`, cut to it; any other one unchanged."""
    if 0 < config.vocab_size - vocab_size < MOST_PADDING:
        config = config.model_copy(update={"vocab_size": vocab_size})
    return config, {name: tensors[name][: shape[0]] for name, shape in expected_tensors(config).items()}


def with_markov_head(config: DrafterConfig, tensors: Mapping[str, Tensor], *, rank: int, fresh: bool) -> Converted:
    """A drafter with an added vanilla Markov head whose bias is zero: its drafts do not change.

    Args:
        fresh: the first matrix is random, so that it can be trained (`train`, drafter.init); else all is zero.

    Raises:
        UserError: it has a Markov head or a candidate selector already.
    """
    if config.markov is not None or config.selector is not None:
        have = "a Markov head" if config.markov else "a candidate selector"
        raise UserError(f"the drafter has {have} already", where="--markov-head", do="leave it out")
    dtype = tensors["fc.weight"].dtype
    first = torch.zeros(config.vocab_size, rank)
    if fresh:
        first.normal_(std=FRESH_STD, generator=torch.Generator().manual_seed(0))
    added = {
        "markov_head.markov_w1.weight": first.to(dtype),
        "markov_head.markov_w2.weight": torch.zeros(config.draft_vocabulary or config.vocab_size, rank, dtype=dtype),
    }
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
    markov = MarkovConfig(kind="vanilla", rank=rank)
    return config.model_copy(update={"markov": markov, "confidence": None}), {**kept, **added}


def target_mask(d2t: Tensor, vocab_size: int) -> Tensor:
    """The `t2d` that belongs to a `d2t`."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[torch.arange(len(d2t)) + d2t] = True
    return mask

"""Finds drafts that SGLang would silently read wrongly, from their files, before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from dflash_serve.checkpoint.reader import Checkpoint, is_plain, open_checkpoint
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.checkpoint.tensors import plain_only
from dflash_serve.errors import Problem, UserError
from dflash_sglang.heads import DFLASH, DSPARK, algorithm_of, head_problems

logger = logging.getLogger(__name__)
READ_BY_SGLANG = "mask_embedding.pt"
"""A pickle that we refuse to read, but SGLang reads safely (weights_only)."""


def draft_problems(server_args: Any) -> list[Problem]:
    """Problems of the draft named in `server_args`.

    Empty if none is named or it cannot be found: SGLang also knows ModelScope and object stores, and `StrictLoad`
    checks what it loads from them.
    """
    if server_args.speculative_draft_model_path is None:
        return []
    try:
        folder = local_folder(server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision)
    except UserError as error:
        logger.warning("dflash-serve: the draft was not checked: %s", error)
        return []
    if not is_plain(folder):
        return []
    checkpoint = open_checkpoint(folder)
    found = [problem for problem in checkpoint.problems if not problem.where.endswith(READ_BY_SGLANG)]
    found += plain_only(checkpoint.quantization, "SGLang", str(folder))
    return [*_dialect(checkpoint), *found, *_heads(checkpoint), *_block_size(checkpoint, server_args)]


def _dialect(checkpoint: Checkpoint) -> Iterator[Problem]:
    """SGLang reads z-lab's dialect and silently skips the keys of others."""
    if checkpoint.config is None or checkpoint.dialect is None:
        return
    do = f"dflash-serve convert {checkpoint.folder} --to zlab"
    if checkpoint.dialect.name == "speculators":
        yield Problem("the draft is written in speculators' dialect, SGLang reads z-lab's", str(checkpoint.folder), do)
    if checkpoint.dialect.name == "modelopt" and any(kind.causal or kind.window for kind in checkpoint.config.layers):
        what = "the draft's windows and causality are written as ModelOpt does, which SGLang does not read"
        yield Problem(what, str(checkpoint.folder), do)
    if checkpoint.config.has_mask_embedding:
        what = "the draft brings its mask embedding as a tensor, which SGLang does not read"
        yield Problem(what, str(checkpoint.folder), "use a draft that masks with a token")


def _heads(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Slots and heads that DFLASH would misread or leave out."""
    if checkpoint.config is None:
        return
    yield from head_problems(checkpoint.config)
    if algorithm_of(checkpoint.config) != DFLASH:
        what = "the draft has a Markov head, which DFLASH silently leaves out"
        yield Problem(what, str(checkpoint.folder), f"start it with --speculative-algorithm {DSPARK}")


def _block_size(checkpoint: Checkpoint, server_args: Any) -> Iterator[Problem]:
    asked = server_args.speculative_num_draft_tokens or server_args.speculative_dflash_block_size
    if checkpoint.config is not None and asked is not None and asked > checkpoint.config.block_size:
        what = f"block size {asked} is larger than the draft's {checkpoint.config.block_size}"
        do = f"use {checkpoint.config.block_size} or less: it was not trained to fill more slots"
        yield Problem(what, "--speculative-num-draft-tokens", do)

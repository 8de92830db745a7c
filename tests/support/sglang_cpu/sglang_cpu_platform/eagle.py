"""PyTorch forms of what SGLang's EAGLE has for GPUs only, for a chain of drafts (`--speculative-eagle-topk 1`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_cpu_platform.attention import attend
from sglang_cpu_platform.platform import ATTENTION


def install() -> None:
    """Puts them in place through SGLang's own hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    operators = "sglang.kernels.ops.speculative"
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    replacements = {
        f"{operators}.spec_tree.build_tree_kernel_efficient_func": build_chain,
        f"{operators}.spec_tree.verify_tree_greedy_func": verify_chain,
        f"{operators}.cache_locs.assign_draft_cache_locs_contiguous_func": draft_entries,
        f"{operators}.eagle.fill_bonus_tokens_func": bonus_tokens_of,
        f"{factory}.create_decode_backend": steps_of,
        f"{factory}.create_draft_extend_backend": the_runners_own,
    }
    for name, function in replacements.items():
        HookRegistry.register(name, function, HookType.REPLACE)


def build_chain(
    parents: Tensor,
    scores: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    steps: int,
    rows: int,
    mode: Any,
) -> None:
    """A tree without branches: every token follows the one before it. Attention is causal, so nobody reads the mask."""
    assert topk == 1
    own = torch.arange(rows)
    positions.copy_((seq_lens[:, None] + own).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(own < rows - 1, own + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def verify_chain(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_predict: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts drafts [b, n] (the target's own token first) up to the first that the target would not have said."""
    agree = candidates[:, 1:] == target_predict[:, :-1]
    accepted = agree.long().cumprod(1).sum(1)
    batch, rows = candidates.shape
    place = torch.arange(batch * rows).view(batch, rows)[:, : accept_index.shape[1]]
    within = torch.arange(place.shape[1]) <= accepted[:, None]
    accept_index.copy_(torch.where(within, place, -1))
    accept_token_num.copy_(accepted)
    predicts.copy_(target_predict.flatten())
    return predicts, accept_index, accept_token_num


def draft_entries(
    requests: Tensor, entries: Tensor, seq_lens: Tensor, out: Tensor, topk: int, columns: int, **_: Any
) -> None:
    """The K/V entries of the `columns` positions that follow each request's own."""
    positions = seq_lens.long()[:, None] + torch.arange(topk * columns)
    out.copy_(entries[requests.long()[:, None], positions].flatten())


def bonus_tokens_of(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int, batch: int) -> None:
    """The last accepted token of each request."""
    bonus.copy_(tokens.flatten()[torch.arange(batch) * stride + lengths.long() - 1])


def the_runners_own(factory: Any) -> None:
    """What a draft is extended with: as prompts are."""


def steps_of(factory: Any) -> Any:
    """A kind of attention for each drafted token but the first, which sees those that were drafted before it."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    runner, count = factory.draft_model_runner, factory.speculative_num_steps - 1
    if count < 1:
        return None
    steps = [ATTENTION_BACKENDS[ATTENTION](runner) for _ in range(count)]
    for number, step in enumerate(steps):
        step._run_sdpa_forward_decode = seeing(number + 1)

    def init_forward_metadata(batch: Any) -> None:
        for step in steps:
            step.init_forward_metadata(batch)

    return SimpleNamespace(attn_backends=steps, init_forward_metadata=init_forward_metadata)


def seeing(drafted: int) -> Any:
    """Decoding over `drafted` more positions than the request has."""

    def decode(query: Tensor, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        k_cache, v_cache, table, requests, lengths, *_ = args
        rows = torch.ones_like(lengths)
        found: Tensor = attend(query, output, (k_cache, v_cache), (table, requests), lengths + drafted, rows, **kwargs)
        return found

    return decode

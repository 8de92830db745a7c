"""PyTorch forms of the kernels with which SGLang verifies sampled drafts, for a chain of drafts (0.5.23).

SGLang 0.5.23 has `tree_speculative_sampling_target_only` for CUDA and MUSA only, and the kernel for drawn drafts
(DFlash2) in Triton. With these forms all of its own Python around the kernels runs on a CPU as it does on a GPU. Tests
that want a build without the first set `SAMPLING` to "absent": then SGLang says that it cannot verify sampled drafts.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

SAMPLING = "SGLANG_CPU_SAMPLING"


def install() -> None:
    """Puts the kernels where SGLang found none."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    drawn = "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton"
    HookRegistry.register(drawn, verify_drawn, HookType.REPLACE)
    if os.environ.get(SAMPLING) == "absent":
        return
    from sglang.srt.speculative import dflash_utils

    dflash_utils.tree_speculative_sampling_target_only = verify_chain
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True


def verify_chain(*, candidates: Tensor, target_probs: Tensor, **more: Any) -> None:
    """Greedy drafts: each was certain."""
    certain = torch.zeros_like(target_probs[:, 1:]).scatter_(2, candidates[:, 1:, None].long(), 1.0)
    verify_drawn(candidates=candidates, target_probs=target_probs, **{**more, "draft_probs": certain})


def verify_drawn(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    **_: Any,
) -> None:
    """Accepts drafts of candidates [n, w] (the anchor first) and samples the token after them; writes the outputs.

    Args:
        predicts: [n * w], written: the tokens gained.
        accept_index: [n, w], written: places in `predicts` of the tokens gained.
        accept_token_num: [n], written: accepted drafts.
        uniform_samples: [n, w - 1] or more, one for each draft; `uniform_samples_for_final_sampling` [n].
        target_probs: [n, w, V].
        draft_probs: [n, w - 1, V], the probabilities that the drafts were drawn with.
    """
    assert threshold_single == threshold_acc == 1.0
    requests, width = candidates.shape
    for request in range(requests):
        accepted, row = 0, target_probs[request, 0]
        accept_index[request, 0] = request * width
        while accepted + 1 < width:
            draft, chance = int(candidates[request, accepted + 1]), draft_probs[request, accepted]
            if not uniform_samples[request, accepted] * chance[draft] < row[draft]:
                row = (row - chance).clamp(min=0.0)
                break
            predicts[request * width + accepted] = draft
            accepted += 1
            accept_index[request, accepted] = request * width + accepted
            row = target_probs[request, accepted]
        mass = row.double().cumsum(0)
        drawn = torch.searchsorted(mass, uniform_samples_for_final_sampling[request].double() * mass[-1], right=True)
        predicts[request * width + accepted] = min(int(drawn), len(row) - 1)
        accept_token_num[request] = accepted

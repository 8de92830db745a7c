"""What the CPU build of vLLM needs on a small machine.

Sampling under speculation reads its temperatures from memory that nobody wrote:
`vllm/utils/cpu_triton_utils.py:390` casts the output of `expand_batch_to_tokens` to int64, which makes a copy for every
other type; the kernel fills the copy. Temperatures above 0 then give gibberish, and `top_k` ends the engine. vLLM calls
`install` in each of its processes; the first use of the function decides whether it is repaired.

Top-k, too: `apply_top_k_only` (`vllm/v1/sample/ops/topk_topp_sampler.py`, CPUs only) takes the largest k of no rows and
ends the engine where a step of sampled requests has no drafted token.

Seeds: a seeded request whose prompt takes several steps ends the engine. `_bookkeeping_sync`
(`vllm/v1/worker/gpu_model_runner.py:3502`) takes the draw of each unfinished step back by the generator's offset, which
generators of CPUs do not have.

Kernels: with DFLASH_SERVE_TEST_KERNELS in the environment, those of `tests/support/vllm_kernels.py` stand in for what
vLLM has for GPUs only.

And waiting: the process that schedules polls while the one that computes is at work (`sched_yield` in
`vllm/distributed/device_communicators/shm_broadcast.py`), which on a machine of two cores takes one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from time import sleep

import torch
from torch import Tensor


def install() -> None:
    """Stands in for the function until it is first used, and where it is wrong."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    _sleep_while_waiting()
    if os.environ.get("DFLASH_SERVE_TEST_KERNELS"):
        import pytest

        from tests.support import vllm_kernels

        vllm_kernels.install(pytest.MonkeyPatch())
    if not current_platform.is_cpu() or rejection_sampler.expand_batch_to_tokens.__module__ == __name__:
        return
    upstream = rejection_sampler.expand_batch_to_tokens

    def decide(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, *replace: int, **named: int) -> Tensor:
        expand = upstream if is_right(upstream) else expand_batch_to_tokens
        rejection_sampler.expand_batch_to_tokens = expand
        return expand(x, cu_num_tokens, num_tokens, *replace, **named)

    torch.Generator = GeneratorWithOffset  # type: ignore[misc]
    rejection_sampler.expand_batch_to_tokens = decide
    top_k_top_p = rejection_sampler.apply_top_k_top_p
    rejection_sampler.apply_top_k_top_p = lambda logits, k, p: top_k_top_p(logits, k, p) if len(logits) else logits


class GeneratorWithOffset(torch.Generator):
    """Has an offset that says nothing: the draws of unfinished prompts are not taken back."""

    def get_offset(self) -> int:
        """Stands for the number of draws."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Takes nothing back."""
        return self


def _sleep_while_waiting() -> None:
    """Looks for news every half a millisecond, where it would look all the time."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = partial(sleep, 0.0005)


def is_right(expand: Callable[..., Tensor]) -> bool:
    """Whether it repeats floats; a buffer that nobody wrote will not hold the random ones we ask for."""
    values, ends = torch.rand(2), torch.tensor([1, 3], dtype=torch.int32)
    return torch.equal(expand(values, ends, 3), values[[0, 1, 1]])


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """x [requests] -> [tokens]: each request's value for each of its tokens; cu_num_tokens are their ends."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    chosen = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return chosen.repeat_interleave(counts, output_size=num_tokens)

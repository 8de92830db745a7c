"""Steps on a CPU that neither verify nor draft a token, on a short way of their own.

vLLM 0.32 takes them through everything that it has for speculation: logits are copied for the rejection sampler
(`vllm/v1/worker/gpu_model_runner.py`, `_sample`), a block's inputs are laid out (`propose_draft_token_ids`), and the
process that schedules asks the workers for drafts that nobody made (`vllm/v1/engine/core.py`, `post_step`). With 16
requests of SmolLM2-135M on two cores that is 3 of 105 ms. Their steps have no hook, so these methods are replaced;
contract/test_vllm_resting holds what is relied on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, int64


def spare_the_worker() -> None:
    """For a drafter that has `rest(features, positions, slots)`; again does nothing."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, propose = GPUModelRunner._sample, GPUModelRunner.propose_draft_token_ids
    if sample.__module__ == __name__:
        return

    def sample_plainly(runner: Any, logits: Any, metadata: Any) -> Any:
        is_plain = metadata is not None and not any(metadata.num_draft_tokens)
        return sample(runner, logits, None if is_plain else metadata)

    def propose_nothing(runner: Any, step: Any, *told: Any) -> Any:
        *_, features, _, attention, _ = told
        positions: Tensor = runner._get_positions(step.total_num_scheduled_tokens)
        rests = not step.num_spec_tokens_to_schedule and not step.scheduled_spec_decode_tokens
        if not rests or features is None or positions.dim() > 1:
            return propose(runner, step, *told)
        rows = len(positions)
        slots = attention.slot_mapping[:rows]
        runner.drafter.model.rest(cat([layer[:rows] for layer in features], dim=-1), positions, slots)
        return positions.new_empty((len(step.num_scheduled_tokens), 0), dtype=int64)

    GPUModelRunner._sample, GPUModelRunner.propose_draft_token_ids = sample_plainly, propose_nothing


def spare_the_scheduler() -> None:
    """For a scheduler that has `drafts_nothing`; again does nothing."""
    from vllm.v1.engine.core import EngineCore

    post_step = EngineCore.post_step
    if post_step.__module__ == __name__:
        return

    def ask_for_drafts(engine: Any, model_executed: bool) -> None:
        if not getattr(engine.scheduler, "drafts_nothing", False):
            post_step(engine, model_executed)

    EngineCore.post_step = ask_for_drafts

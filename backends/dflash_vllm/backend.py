"""vLLM as a backend: a plan's command, choices and notes. vLLM's own server serves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_serve.backend import Command
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.errors import Problem
from dflash_serve.server_adapter import Choice, DraftForm, ServerAdapter

from .arguments import arguments, drafter_attention
from .checks import problems
from .engine_arguments import own_arguments
from .facts import FACTS, REAL_OFF, RELEASES
from .heads import UNTRIED, dialect_of, head_problems
from .launch_plan import ROWS, VLLMPlan
from .schedule import GUESSED_COSTS

LAUNCHER = "vllm.entrypoints.cli.main"
"""The module behind the command `vllm`; this Python runs it, so that it is the vLLM that was checked."""


class VLLMBackend(ServerAdapter[VLLMPlan]):
    """Checks and command line for vLLM 0.32-0.33. Needs neither a GPU nor vLLM until the command is run."""

    name = "vllm"
    facts = FACTS
    releases = str(RELEASES)
    untried = UNTRIED
    drafting_arguments = ("speculative_config", "spec_method")
    plan = VLLMPlan
    loggers = ("vllm", "uvicorn", "uvicorn.access", "uvicorn.error")
    logging_variable = "VLLM_LOGGING_CONFIG_PATH"

    def problems(self, plan: VLLMPlan) -> list[Problem]:
        """Problems of a plan, in the order in which a user would fix them."""
        return problems(plan)

    def head_problems(self, heads: Heads) -> list[Problem]:
        """Reasons why the engine does not serve such a drafter."""
        return list(head_problems(heads))

    def own_arguments(self, *, drafter: bool) -> Mapping[str, str]:
        """Arguments that keys of the deployment stand for, with those keys."""
        return own_arguments(drafter=drafter)

    def draft_form(self, drafter: DrafterConfig, target: str) -> DraftForm:
        """vLLM reads every key, and the target's name in speculators' dialect."""
        dialect = dialect_of(drafter)
        return DraftForm(dialect, "z-lab's dialect" if dialect == "zlab" else f"the dialect {dialect}", target)

    def launch(self, plan: VLLMPlan, folder: Path, host: str, port: int) -> Command:
        """The command line for a prepared folder."""
        argv = [sys.executable, "-m", LAUNCHER, "serve", *arguments(plan, folder)]
        env = {GUESSED_COSTS: plan.guessed_costs} if plan.has_our_scheduler else {}
        return Command((*argv, "--host", host, "--port", str(port)), {**env, **self.shared_environment(plan, folder)})

    def choices(self, plan: VLLMPlan) -> Iterator[Choice]:
        """Settings that the deployment leaves open.

        Raises:
            UserError: the cost table or the survival that was given is none.
        """
        deployment = plan.deployment
        if deployment.limits.max_batch_size is None:
            yield _max_batch_size(plan)
        if deployment.limits.max_model_len is None and plan.target.shape.max_position_embeddings is not None:
            longest = plan.target.shape.max_position_embeddings
            yield Choice("limits.max_model_len", f"{longest}", "the target's positions")
        if plan.drafter is not None:
            yield from _speculation(plan)
        if deployment.hardware.gpu is None:
            yield Choice("hardware.gpu", "not named", "memory is not checked")
        if deployment.hardware.dtype == "auto":
            why = "what losslessness is exact in" if plan.on_cpu else "what drafters are published in"
            yield Choice("hardware.dtype", plan.dtype, why)

    def notes(self, plan: VLLMPlan) -> Iterator[str]:
        """Limits that no key of the deployment mentions."""
        if plan.drafter is None:
            return
        if plan.verifies_whole_blocks:
            family = plan.drafter.family
            yield f"{family} on vLLM was read, not run: compare it with the target by `dflash-serve verify`"
        yield "requests with min_p or logit_bias are answered by HTTP 400: vLLM has neither with speculation"
        release = RELEASES.numbers(RELEASES.installed())
        if 1 in plan.widths and not plan.on_cpu and (release is None or release < REAL_OFF):
            yield "before vLLM 0.33 steps without speculation still pay for a draft: use 0.33"


def _max_batch_size(plan: VLLMPlan) -> Choice:
    if plan.drafter is not None:
        why = "vLLM's own number on smaller GPUs; schedules of widths need one"
        return Choice("limits.max_batch_size", f"{plan.max_batch_size}", why)
    return Choice("limits.max_batch_size", "vLLM's choice", "by the GPU's memory; vLLM logs it")


def _speculation(plan: VLLMPlan) -> Iterator[Choice]:
    limits, speculation = plan.deployment.limits, plan.deployment.speculation
    if limits.max_num_tokens is None:
        why = "vLLM's own number for large GPUs" if plan.rows == ROWS else "a full batch of blocks"
        yield Choice("limits.max_num_tokens", f"{plan.rows}", why)
    if speculation.block_size is None:
        yield Choice("speculation.block_size", f"{plan.block_size}", "the drafter's own")
    width = plan.block_size if plan.verifies_whole_blocks else speculation.width
    yield Choice("speculation.width", str(width), _width(plan))
    kernels = drafter_attention(plan)
    if kernels is not None:
        yield Choice("attention of the drafter", kernels, "vLLM's kernels for blocks that are not causal")


def _width(plan: VLLMPlan) -> str:
    if plan.has_our_scheduler:
        return f"our scheduler inside vLLM chooses {', '.join(map(str, plan.widths))} at every step"
    if plan.schedule() is not None:
        return "a schedule computed from the costs and the survival that were given"
    if plan.verifies_whole_blocks and plan.drafter is not None:
        return f"vLLM's own {plan.drafter.family}: whole blocks, the width never changes"
    return "whole blocks" if plan.widths == (plan.block_size,) else "one width in every step"


backend = VLLMBackend()

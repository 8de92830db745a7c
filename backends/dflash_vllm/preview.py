"""What vLLM makes of what a Deployment leaves open, and what would be written for it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.common.json_log import logging_config
from dflash_serve.preview import Choice, PreparedFile, Preview, survival_files

from .arguments import DRAFT, LOGGERS, LOGGING, SECRETS, drafter_attention
from .facts import REAL_OFF, installed_version, parse_release
from .heads import dialect_of
from .launch_plan import ROWS, LaunchPlan


def preview(plan: LaunchPlan) -> Preview:
    """Everything but the command and the problems.

    Raises:
        UserError: the cost table or the survival that was given is none.
    """
    return Preview(list(_files(plan)), list(_choices(plan)), list(_notes(plan)))


def _files(plan: LaunchPlan) -> Iterator[PreparedFile]:
    if plan.drafter is not None and plan.checkpoint is not None:
        dialect, target = dialect_of(plan.drafter), plan.deployment.target.model
        text = json.dumps(DIALECTS[dialect].write(plan.drafter, target), indent=2, sort_keys=True) + "\n"
        form = "z-lab's dialect" if dialect == "zlab" else f"the dialect {dialect}"
        yield PreparedFile(f"{DRAFT}/config.json", f"the drafter's description in {form}", text)
        count = len(plan.checkpoint.headers)
        yield PreparedFile(f"{DRAFT}/model.safetensors", f"the drafter's {count} tensors, under z-lab's names")
        yield from survival_files(plan.checkpoint.folder, DRAFT)
    if plan.deployment.serving.api_key_file is not None:
        yield PreparedFile(SECRETS, "the API keys, readable by their owner alone")
    if plan.deployment.serving.log_format == "json":
        yield PreparedFile(LOGGING, "logs as JSON", logging_config(*LOGGERS))


def _choices(plan: LaunchPlan) -> Iterator[Choice]:
    deployment = plan.deployment
    limits = deployment.limits
    if limits.max_batch_size is None:
        yield _max_batch_size(plan)
    if limits.max_model_len is None and plan.target.shape.max_position_embeddings is not None:
        longest = plan.target.shape.max_position_embeddings
        yield Choice("limits.max_model_len", f"{longest}", "the target's positions")
    if plan.drafter is not None:
        yield from _speculation(plan)
    if deployment.hardware.gpu is None:
        yield Choice("hardware.gpu", "not named", "memory is not checked")
    if deployment.hardware.dtype == "auto":
        why = "what losslessness is exact in" if plan.on_cpu else "what drafters are published in"
        yield Choice("hardware.dtype", plan.dtype, why)


def _max_batch_size(plan: LaunchPlan) -> Choice:
    if plan.drafter is not None:
        why = "vLLM's own number on smaller GPUs; schedules of widths need one"
        return Choice("limits.max_batch_size", f"{plan.max_batch_size}", why)
    return Choice("limits.max_batch_size", "vLLM's choice", "by the GPU's memory; vLLM logs it")


def _speculation(plan: LaunchPlan) -> Iterator[Choice]:
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


def _width(plan: LaunchPlan) -> str:
    if plan.has_our_scheduler:
        return f"our scheduler inside vLLM chooses {', '.join(map(str, plan.widths))} at every step"
    if plan.schedule() is not None:
        return "a schedule worked out of the costs and the survival that were given"
    if plan.verifies_whole_blocks and plan.drafter is not None:
        return f"vLLM's own {plan.drafter.family}: whole blocks, the width never changes"
    return "whole blocks" if plan.widths == (plan.block_size,) else "one width in every step"


def _notes(plan: LaunchPlan) -> Iterator[str]:
    if plan.drafter is None:
        return
    if plan.verifies_whole_blocks:
        yield f"{plan.drafter.family} on vLLM was read, not run: hold it against the target with `dflash-serve verify`"
    yield "requests with min_p or logit_bias are answered by HTTP 400: vLLM has neither with speculation"
    release = parse_release(installed_version() or "")
    if 1 in plan.widths and not plan.on_cpu and (release is None or release < REAL_OFF):
        yield "before vLLM 0.33 steps without speculation still pay for a draft: use 0.33"

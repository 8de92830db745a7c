"""What SGLang makes of what a Deployment leaves open, and what would be written for it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.common.json_log import logging_config
from dflash_serve.preview import Choice, PreparedFile, Preview, survival_files

from .arguments import DRAFT, LOGGING, SECRETS, kernels_of
from .heads import DSPARK, dialect_of
from .launch_plan import LaunchPlan

SPECULATING_REQUESTS = 48
"""SGLang 0.5.23's --max-running-requests for speculation, where none is given (arg_groups/speculative_hook.py)."""


WORDS = {"zlab": "z-lab's", "deepspec": "DeepSpec's"}


def preview(plan: LaunchPlan) -> Preview:
    """Everything but the command and the problems."""
    return Preview(list(_files(plan)), list(_choices(plan)), list(_notes(plan)))


def _files(plan: LaunchPlan) -> Iterator[PreparedFile]:
    if plan.drafter is not None and plan.checkpoint is not None:
        dialect = dialect_of(plan.drafter)
        fields = {**DIALECTS[dialect].write(plan.drafter, None), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        yield PreparedFile(f"{DRAFT}/config.json", f"the drafter's description in {WORDS[dialect]} dialect", text)
        count = len(plan.checkpoint.headers)
        yield PreparedFile(f"{DRAFT}/model.safetensors", f"the drafter's {count} tensors in bfloat16")
        yield from survival_files(plan.checkpoint.folder, DRAFT)
    if plan.deployment.serving.api_key_file is not None:
        yield PreparedFile(SECRETS, "the API key, readable by its owner alone")
    if plan.deployment.serving.log_format == "json":
        yield PreparedFile(LOGGING, "logs as JSON", logging_config("sglang"))


def _choices(plan: LaunchPlan) -> Iterator[Choice]:
    deployment = plan.deployment
    limits, speculation, gpu = deployment.limits, deployment.speculation, plan.gpu
    if limits.max_batch_size is None:
        yield _max_batch_size(plan)
    if limits.max_model_len is None and plan.target.shape.max_position_embeddings is not None:
        longest = plan.target.shape.max_position_embeddings
        yield Choice("limits.max_model_len", f"{longest}", "the target's positions")
    if plan.drafter is not None and speculation.block_size is None:
        yield Choice("speculation.block_size", f"{plan.block_size}", "the drafter's own")
    if plan.drafter is not None:
        ours = plan.width is not None
        why = "our worker in SGLang serves it" if ours else f"SGLang's own {plan.family}: the width never changes"
        width = plan.block_size if plan.whole_blocks_with is not None else speculation.width
        yield Choice("speculation.width", str(width), why)
    if gpu is None:
        yield Choice("hardware.gpu", "not named", "memory is not checked, and SGLang chooses the attention kernels")
    elif not plan.target.latent and "attention-backend" not in plan.engine_args:
        kernels = kernels_of(gpu)
        drafts = f", {kernels.drafter} for the drafter" if plan.drafter is not None else ""
        yield Choice("attention kernels", f"{kernels.target}{drafts}", f"what serves DFlash on a {gpu.name}")
    if deployment.hardware.dtype == "auto":
        yield Choice("hardware.dtype", "bfloat16", "what SGLang's DFlash computes in")


def _max_batch_size(plan: LaunchPlan) -> Choice:
    each = " for each copy of the model" if plan.deployment.parallel.data > 1 else ""
    if plan.drafter is not None:
        why = f"SGLang's own number for speculation{each}; it lowers it where memory is short"
        return Choice("limits.max_batch_size", f"{SPECULATING_REQUESTS}", why)
    why = f"SGLang takes what its K/V memory holds{each}, and logs it"
    return Choice("limits.max_batch_size", "SGLang's choice", why)


def _notes(plan: LaunchPlan) -> Iterator[str]:
    if plan.algorithm == DSPARK:
        yield "SGLang's own DSPARK serves it alone: our plug-in counts no slots there and refuses no request"
    elif plan.drafter is not None and plan.width is None:
        yield "requests with penalties are refused: SGLang's own DFlash would not apply them"
    if plan.whole_blocks_with is not None and plan.deployment.speculation.width == "auto":
        whole = f"whole blocks of {plan.block_size} slots with {plan.whole_blocks_with}"
        yield f"SGLang verifies {whole}: auto changes nothing"

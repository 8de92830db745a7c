"""A Deployment to a running engine: load, lay out, measure."""

from __future__ import annotations

import torch

from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.errors import UserError
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.loader import load_drafter, load_target, load_tokenizer
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.width import AutoWidth, FixedWidth

from .calibration import cost_of
from .engine import EmbeddedEngine
from .scheduler import Scheduler
from .speculator import Speculator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def start_engine(deployment: Deployment) -> EmbeddedEngine:
    """Loads and starts what `EmbeddedBackend.check` has passed."""
    device, model = _device(deployment), deployment.target
    dtype = DTYPES.get(deployment.hardware.dtype)
    target = load_target(model.model, dtype=dtype, device=device, revision=model.revision)
    target.pack()
    max_batch_size, capacity = deployment.limits.max_batch_size, _capacity(deployment, target)
    speculator = _speculator(deployment, target, max_batch_size, capacity) if uses_drafter(deployment) else None
    scheduler = Scheduler(target, speculator, FixedWidth(1), max_batch_size=max_batch_size, capacity=capacity)
    if speculator is not None:
        width = deployment.speculation.width
        scheduler.policy = (
            FixedWidth(width)
            if isinstance(width, int)
            else AutoWidth(cost_of(scheduler, speculator), speculator.block_size)
        )
    return EmbeddedEngine(scheduler, load_tokenizer(model.model, model.revision))


def _device(deployment: Deployment) -> str:
    """The GPU where there is one, unless the deployment says `gpu: none`."""
    gpu = deployment.hardware.gpu
    if gpu not in (None, "none") and not torch.cuda.is_available():
        raise UserError(
            f"{gpu} is asked for, but PyTorch sees no GPU", where="hardware.gpu", do="run it there, or none"
        )
    return "cpu" if gpu == "none" or not torch.cuda.is_available() else "cuda"


def _speculator(deployment: Deployment, target: TargetModel, max_batch_size: int, capacity: int) -> Speculator:
    assert deployment.drafter is not None
    drafter = load_drafter(
        deployment.drafter.model,
        revision=deployment.drafter.revision,
        dtype=target.embedding.dtype,
        device=target.device,
    )
    block_size = deployment.speculation.block_size or drafter.config.block_size
    return Speculator(
        FusedDrafter(drafter), target, block_size=block_size, max_batch_size=max_batch_size, capacity=capacity
    )


def _capacity(deployment: Deployment, target: TargetModel) -> int:
    """Tokens of prompt and answer that one sequence may have."""
    return deployment.limits.max_model_len or target.config.max_position_embeddings

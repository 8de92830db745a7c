"""A Deployment to a running engine: load, measure what passes cost here, choose the widths by it."""

from __future__ import annotations

import torch

from dflash_serve.checkpoint.source import drafter_folder
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.errors import UserError
from dflash_serve.last_run import KeptWidth, LastRun
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.loader import load_drafter, load_target, load_tokenizer
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.policy import FixedWidth, WidthPolicy

from .calibration import cost_of
from .engine import EmbeddedEngine
from .launch import own_arguments
from .precision import choose_dtype
from .scheduler import Scheduler
from .shapes import sizes
from .speculator import Speculator


def start_engine(deployment: Deployment) -> EmbeddedEngine:
    """Loads and starts what `EmbeddedBackend.check` has passed; its `limits.max_batch_size` is filled in."""
    model, entries = deployment.target, deployment.limits.max_batch_size
    assert entries is not None
    device = _device(deployment)
    compiled = own_arguments(deployment).get("operators") != "plain"
    dtype = choose_dtype(deployment, device, compiled=compiled)
    target = load_target(model.model, dtype=dtype, device=device, revision=model.revision)
    target.pack(compiled=compiled)
    capacity = deployment.limits.max_model_len or target.config.max_position_embeddings
    speculator: Speculator | None = None
    policy: WidthPolicy = FixedWidth(1)
    if uses_drafter(deployment):
        drafter = _drafter(deployment, target, compiled=compiled)
        block_size = deployment.speculation.block_size or drafter.config.block_size
        speculator = Speculator(drafter, target, block_size=block_size, max_batch_size=entries, capacity=capacity)
        policy = _policy(deployment, speculator, entries)
    scheduler = Scheduler(target, speculator, policy, max_batch_size=entries, capacity=capacity)
    scheduler.prepare()
    return EmbeddedEngine(scheduler, load_tokenizer(model.model, model.revision))


def _device(deployment: Deployment) -> str:
    """The GPU where there is one, unless the deployment says `gpu: none`."""
    gpu = deployment.hardware.gpu
    if gpu not in (None, "none") and not torch.cuda.is_available():
        raise UserError(
            f"{gpu} is asked for, but PyTorch sees no GPU", where="hardware.gpu", do="run it there, or none"
        )
    return "cpu" if gpu == "none" or not torch.cuda.is_available() else "cuda"


def _drafter(deployment: Deployment, target: TargetModel, *, compiled: bool) -> FusedDrafter:
    assert deployment.drafter is not None
    model, revision = deployment.drafter.model, deployment.drafter.revision
    drafter = load_drafter(model, revision=revision, dtype=target.embedding.dtype, device=target.device)
    return FusedDrafter(drafter, compiled=compiled)


def _policy(deployment: Deployment, speculator: Speculator, entries: int) -> WidthPolicy:
    width = deployment.speculation.width
    if isinstance(width, int):
        return FixedWidth(width)
    assert deployment.drafter is not None
    cost = cost_of(speculator.target, speculator.drafter, speculator.block_size, entries)
    folder = drafter_folder(deployment.drafter.model, deployment.drafter.revision)
    # Padded passes take as long as the widest block in them for everyone.
    shared = sizes(1, speculator.block_size) if speculator.drafter_runner.static else None
    return KeptWidth(cost, speculator.block_size, LastRun(folder, deployment.target.model), shared)

"""What a target is computed in where the deployment leaves it open (`hardware.dtype: auto`)."""

from __future__ import annotations

import hashlib
import logging
from time import perf_counter

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat
from torch import nn

from dflash_serve.checkpoint.source import target_folder
from dflash_serve.common.files import cache_home, keep_record, read_record
from dflash_serve.common.provenance import processor
from dflash_serve.deployment import Deployment
from dflash_serve.models.compiled.build import kernels_id
from dflash_serve.models.layers import pack_linear
from dflash_serve.models.loader import is_stored_in_bfloat16
from dflash_serve.models.target_config import read_target_config

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = (1, 8, 32)
"""Rows of a plain step, of a block, of a crowd."""
REPETITIONS = 6
WORTH = 1.1
"""How much faster bfloat16 must be: greedy answers are float32's no more where two tokens are nearly alike."""


class Measured(BaseModel):
    """How much faster bfloat16 was found to be, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faster: PositiveFloat
    layer: tuple[int, int]
    machine: str
    operators: str


def choose_dtype(deployment: Deployment, device: str, *, compiled: bool) -> torch.dtype:
    """What was asked for; else bfloat16 on a GPU, and on a CPU where it rounds no weight and was measured to be faster.

    Raises:
        UserError: the target's folder has no usable weights.
    """
    asked = DTYPES.get(deployment.hardware.dtype)
    if asked is not None or device != "cpu":
        return asked or torch.bfloat16
    folder = target_folder(deployment.target.model, deployment.target.revision)
    if not is_stored_in_bfloat16(folder):
        return torch.float32
    config = read_target_config(folder)
    faster = _kept_measurement(config.hidden_size, config.intermediate_size, compiled=compiled)
    chosen = torch.bfloat16 if faster >= WORTH else torch.float32
    log.info("%s: a layer of this target takes %.2f times as long in float32 as in bfloat16", chosen, faster)
    return chosen


def _kept_measurement(inputs: int, outputs: int, *, compiled: bool) -> float:
    """Measured once for each layer and machine: a server started again computes as it did before."""
    machine = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    asked = {"layer": (inputs, outputs), "machine": machine, "operators": kernels_id() if compiled else "plain"}
    name = hashlib.sha256(repr(sorted(asked.items())).encode()).hexdigest()[:24]
    path = cache_home() / "dtype" / f"{name}.json"
    kept = read_record(path, Measured)
    if kept is not None:
        return kept.faster
    measured = Measured(faster=how_much_faster(inputs, outputs, compiled=compiled), **asked)
    keep_record(path, measured, otherwise="how fast bfloat16 is is measured again next time")
    return measured.faster


def how_much_faster(inputs: int, outputs: int, *, compiled: bool) -> float:
    """Seconds of a linear layer of bfloat16's weights in float32 over those in bfloat16; the least of repetitions."""
    weight = torch.randn(outputs, inputs).bfloat16()
    layers: dict[torch.dtype, nn.Module] = {}
    for dtype in DTYPES.values():
        linear = nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        layers[dtype] = pack_linear(linear, compiled=compiled)
    seconds = dict.fromkeys(layers, 0.0)
    for rows in ROWS:
        least = dict.fromkeys(layers, float("inf"))
        for _ in range(REPETITIONS):
            for dtype, layer in layers.items():
                x = torch.ones(rows, inputs, dtype=dtype)
                start = perf_counter()
                layer(x)
                least[dtype] = min(least[dtype], perf_counter() - start)
        seconds = {dtype: seconds[dtype] + least[dtype] for dtype in layers}
    return seconds[torch.float32] / seconds[torch.bfloat16]

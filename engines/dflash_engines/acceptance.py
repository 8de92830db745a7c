"""What quantisation costs: acceptance of every drafter on the same prompts, by the embedded backend, greedy."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path

import torch

from dflash_serve.backend import backend
from dflash_serve.checkpoint.formats import dequantized
from dflash_serve.checkpoint.reader import load_weights, read_config
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .calibration import read_prompts
from .recipe import Acceptance
from .step import Measured, Work

ENOUGH = {"fp8": 0.99, "nvfp4": 0.95}
"""Acceptance length relative to bf16 below which a precision is not worth its speed."""


def measure(work: Work, deployment: Deployment, wanted: Acceptance, formats: Sequence[str]) -> Measured:
    """Step `acceptance`: acceptance length by precision, and its ratio to the unquantised drafter's."""
    prompts = read_prompts(work.inputs["acceptance prompts"], wanted.count, wanted.skip)
    drafters = {"bf16": work.inputs["drafter"]}
    for format in formats:
        config, weights = load_weights(work.inputs[f"drafter-{format}"])
        drafters[format] = work.folder / f".{format}"
        write_drafter(drafters[format], config, dequantized(weights, torch.float32))
    measured: Measured = {"prompts": len(prompts), "max_tokens": wanted.max_tokens}
    base: float | None = None
    for name, folder in drafters.items():
        work.say(f"{name} on {len(prompts)} prompts")
        statistics = accept(deployment, work.inputs["target"], folder, prompts, wanted.max_tokens)
        length = statistics.acceptance_length
        if length is None:
            raise UserError("no answer had a step to measure", where="acceptance", do="raise max_tokens")
        base = base or length
        error = standard_error(statistics)
        entry: dict[str, object] = {
            "acceptance_length": round(length, 4), "standard_error": round(error, 4), "steps": statistics.steps,
        }  # fmt: skip
        if name != "bf16":
            entry |= {"of_bf16": round(length / base, 4), "enough": length / base >= ENOUGH[name]}
            shutil.rmtree(folder)
        measured[name] = entry
    return measured


def standard_error(statistics: AcceptanceStatistics) -> float:
    """Of the mean acceptance length, steps taken as independent: a ratio is only as sure as this."""
    lengths, count = statistics.acceptance_lengths, sum(statistics.acceptance_lengths.values())
    mean = sum(length * n for length, n in lengths.items()) / count
    return float((sum(n * (length - mean) ** 2 for length, n in lengths.items()) / count / count) ** 0.5)


def accept(
    deployment: Deployment, target: Path, drafter: Path, prompts: Sequence[str], max_tokens: int
) -> AcceptanceStatistics:
    """Acceptance over all answers; width is the whole block, so that the policy has no say in it."""
    block = deployment.speculation.block_size or read_config(drafter)[0].block_size
    embedded = Deployment.model_validate({
        "target": {"model": str(target)}, "drafter": {"model": str(drafter)},
        "speculation": {"block_size": block, "width": block},
        "limits": {"max_batch_size": 4, "max_model_len": deployment.limits.max_model_len},
    })  # fmt: skip
    engine = backend("torch").engine(embedded)
    params = [SamplingParams(temperature=0, max_tokens=max_tokens)] * len(prompts)
    for _ in engine.stream([[{"role": "user", "content": prompt}] for prompt in prompts], params):
        pass
    return reduce(add, (output.statistics for output in engine.outputs()), AcceptanceStatistics())

"""Acceptance of every quantised drafter beside the unquantised one: same prompts, embedded backend, greedy.

Weights are decoded. Inputs of a block's products are rounded as an engine rounds them: FP8 by a static scale, NVFP4 by
a static scale and one of each 16 values. The context K/V product has plain inputs, as it has on TensorRT-LLM with our
plug-in, the one engine that reads these drafters.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dflash_serve.answers.prompts import jsonl_prompts
from dflash_serve.checkpoint.formats import Format as Storage
from dflash_serve.checkpoint.formats import QuantizedTensor, Weight, dequantized, quantize
from dflash_serve.checkpoint.reader import load_weights
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

from .calibration import embedded_engine, greedy_answers
from .pipeline import Measured, Work
from .recipe import Acceptance, Format, Integers

PARTS = {"qkv": "q_proj", "gate_up": "gate_proj"}
"""Fused product of the embedded engine -> one of its parts; all parts share their input scale."""
ENOUGH = {"fp8": 0.99, "nvfp4": 0.95, "int8": 0.99, "w8a16": 0.99, "w4a16": 0.95}
"""Least acceptance length relative to bf16; below it a precision costs more than its speed gives."""


def measure(work: Work, deployment: Deployment, wanted: Acceptance, formats: Sequence[Format | Integers]) -> Measured:
    """Step `acceptance`: acceptance length by precision, and its ratio to the unquantised drafter's.

    Raises:
        UserError: no answer had a step to measure.
    """
    prompts = jsonl_prompts(work.inputs["acceptance prompts"])[wanted.skip :][: wanted.count]
    measured: Measured = {"prompts": len(prompts), "max_tokens": wanted.max_tokens}
    base: Sequence[AcceptanceStatistics] | None = None
    for name, drafter, weights in _drafters(work, formats):
        work.say(f"{name} on {len(prompts)} prompts")
        answers = measure_drafter(deployment, work.inputs["target"], drafter, prompts, wanted.max_tokens, weights)
        statistics = total(answers)
        if statistics.acceptance_length is None:
            raise UserError("no answer had a step to measure", where="acceptance", do="raise max_tokens")
        length = round(statistics.acceptance_length, 4)
        entry: dict[str, object] = {"acceptance_length": length, "steps": statistics.verifications}
        if base is None:
            base = answers
        else:
            ratio, least, most = ratio_of(answers, base)
            entry |= {"of_bf16": round(ratio, 4), "interval": [round(least, 4), round(most, 4)]}
            entry |= {"enough": ratio >= ENOUGH[name]}
        measured[name] = entry
    return measured


def _drafters(work: Work, formats: Sequence[Format | Integers]) -> Iterator[tuple[str, Path, Mapping[str, Weight]]]:
    # Precision, folder and stored weights of each drafter, bf16 first. A quantised one is decoded, and deleted once
    # measured.
    yield "bf16", work.inputs["drafter"], {}
    for format in formats:
        config, weights = load_weights(work.inputs[f"drafter-{format}"])
        folder = work.folder / f".{format}"
        write_drafter(folder, config, dequantized(weights, torch.float32))
        yield format, folder, weights
        shutil.rmtree(folder)


def measure_drafter(
    deployment: Deployment,
    target: Path,
    drafter: Path,
    prompts: Sequence[str],
    max_tokens: int,
    weights: Mapping[str, Weight] | None = None,
) -> list[AcceptanceStatistics]:
    """Acceptance of each answer. Every step verifies the whole block, so no width policy influences it.

    Args:
        weights: of the quantised drafter that `drafter` was decoded from; the inputs of its products are rounded, too.
    """
    engine = embedded_engine(deployment, target, drafter)
    assert engine.block_size is not None
    round_inputs(cast(Any, engine).scheduler.speculator.drafter, weights or {})
    answers = greedy_answers(engine.fixed(engine.block_size), prompts, max_tokens)
    return [answer.statistics for answer in answers]


def round_inputs(drafter: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Rounds the inputs of the embedded engine's fused products by the input scales of `weights`."""
    for name, module in drafter.named_modules():
        layer, _, product = name.rpartition(".")
        weight = weights.get(f"{layer}.{PARTS.get(product, product)}.weight")
        if isinstance(weight, QuantizedTensor) and weight.input_scale is not None:
            module.register_forward_pre_hook(partial(_rounded, weight.format, weight.input_scale))


def _rounded(format: Storage, scale: Tensor, module: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
    rows = arguments[0].float().reshape(-1, arguments[0].shape[-1])
    return quantize(rows, format, of_tensor=scale.float()).dequantize(arguments[0].dtype).view(arguments[0].shape)


def ratio_of(
    answers: Sequence[AcceptanceStatistics], base: Sequence[AcceptanceStatistics]
) -> tuple[float, float, float]:
    """Ratio of acceptance lengths to those of `base`, with the ends of its 95 % confidence interval.

    Both sides answered the same prompts, so differences between prompts cancel: delta method on the logarithm of the
    ratio, prompt by prompt.
    """
    tokens, steps = (np.array(counts, float) for counts in zip(*map(_tokens_and_steps, answers), strict=True))
    base_tokens, base_steps = (np.array(counts, float) for counts in zip(*map(_tokens_and_steps, base), strict=True))
    shares = [counts / counts.sum() for counts in (tokens, base_steps, steps, base_tokens)]
    spread = 1.96 * float(np.sqrt(np.sum((shares[0] + shares[1] - shares[2] - shares[3]) ** 2)))
    ratio = float(tokens.sum() * base_steps.sum() / steps.sum() / base_tokens.sum())
    return ratio, ratio * exp(-spread), ratio * exp(spread)


def _tokens_and_steps(answer: AcceptanceStatistics) -> tuple[float, float]:
    # Tokens gained by steps with a draft, and the number of these steps.
    steps = answer.verifications or 0
    return steps + (answer.accepted or 0), steps

"""The numbers that made DFlash known, beside what the planner says of them, or why it can say nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from dflash_serve.planning.prediction import ExpectedAcceptance, Load, OperatingPoint, Predictor, from_length
from dflash_serve.planning.search import fastest, front
from dflash_serve.planning.step_times import Constants, Split, constants_of

TIMES = Callable[..., Any]
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TRANSFORMERS = {
    "GSM8K": (5.15, 6.54), "MATH-500": (6.08, 7.87), "AIME25": (5.62, 7.08), "HumanEval": (5.14, 6.50),
    "MBPP": (4.65, 5.95), "LCB": (5.51, 7.27), "MT-Bench": (2.75, 4.24),
}  # fmt: skip
"""Qwen3-8B in Transformers, greedy, batch 1: speed-up and tau (paper, table 1)."""


def seeds(times_of: TIMES, constants: Constants) -> list[dict[str, Any]]:
    """A line each: what was claimed, what is predicted, and what to make of it."""
    return [
        *_not_reproduced(),
        _speed_up("Qwen3-8B, Math500, SGLang, concurrency 1, B200", 5.1, times_of, constants),
        _speed_bench("gpt-oss-120b, SPEED-Bench, matched concurrency", 2.3, "gpt-oss-120b", 8, 4.4, times_of),
        _speed_bench("Llama-3.1-8B, SPEED-Bench, matched concurrency", 2.8, "llama-3.1-8b", 1, 4.3, times_of),
        _transformers(),
        _headline(times_of),
    ]


def _not_reproduced() -> list[dict[str, Any]]:
    gemma = (
        "the tables have no bf16 attention of Gemma 4's heads (256, window 1024) for vLLM, and its tau is not published"
    )
    llama = "a digest: another drafter and target, an 'asynchronous' verification that DFlash has not"
    return [
        _line(
            "Llama-2-7B with a 68M drafter, one B200: 15.2x, 3.8x over EAGLE", None, None, f"not reproduced: {llama}"
        ),
        _line("Gemma 4 31B, vLLM, concurrency 1: Math500", 5.8, None, f"not reproduced: {gemma}"),
        _line("Gemma 4 31B, vLLM, concurrency 1: HumanEval", 5.6, None, f"not reproduced: {gemma}"),
        _line("1.5x EAGLE-3 at equal interactivity", 1.5, None, "not reproduced: EAGLE-3's step is not modelled"),
    ]


def _line(claim: str, published: float | None, predicted: float | None, remark: str) -> dict[str, Any]:
    error = None if published is None or predicted is None else round(predicted / published - 1, 4)
    shown = None if predicted is None else round(predicted, 2)
    return {"claim": claim, "published": published, "predicted": shown, "error": error, "remark": remark}


def _speed_up(claim: str, published: float, times_of: TIMES, constants: Constants) -> dict[str, Any]:
    predictor = Predictor(times_of("qwen3-8b", "b200", "sglang"), constants, Load(120, 900), 16)
    ratio = predictor.point("", 1, 16, 8.01).interactivity / predictor.point("", 1, 1, 1.0).interactivity
    return _line(claim, published, ratio, "tau 8.01 (paper, table 3); a row that the constants were fitted to")


def _speed_bench(claim: str, published: float, name: str, tensor: int, tau: float, times_of: TIMES) -> dict[str, Any]:
    """Mean over batch 1 to 64 of the ratio of tokens/s/user, without prefills, on B300."""
    found = []
    for extra in (0.3, 1.0):
        constants = constants_of("tensorrt-llm", None)
        constants = constants.model_copy(update={"speculative_step": constants.plain_step + extra})
        predictor = Predictor(times_of(name, "b300", "sglang", tensor), constants, Load(1024, 1024), 10, Split(tensor))
        ratios = [tau * predictor.step(b, 1).total / predictor.step(b, 10).total for b in (1, 2, 4, 8, 16, 32, 64)]
        found.append(mean(ratios))
    remark = (
        f"TP {tensor}, tau {tau} assumed; {found[0]:.2f} or {found[1]:.2f} as a speculative step costs 0.3 or 1 ms more"
    )
    return _line(
        claim, published, found[1], f"{remark}: the second is what the constants assume, chosen with this in view"
    )


def _transformers() -> dict[str, Any]:
    """One constant explains seed 002's table: speed-up = a x tau."""
    factor = sorted(speed / tau for speed, tau in TRANSFORMERS.values())[len(TRANSFORMERS) // 2]
    errors = {task: factor * tau / speed - 1 for task, (speed, tau) in TRANSFORMERS.items()}
    told = ", ".join(f"{task} {error:+.0%}" for task, error in errors.items())
    told = f"speed-up = {factor:.3f} tau (a median, so in sample): {told}"
    return _line("Qwen3-8B in Transformers, batch 1, mean of 7 tasks", 4.86, factor * 6.49, told)


def _headline(times_of: TIMES) -> dict[str, Any]:
    """15x at 500 to 600 tokens/s/user: gpt-oss-120b on eight B300s, 1k/1k, tau(10) = 4.4."""
    constants, load = constants_of("tensorrt-llm", None), Load(1024, 1024)
    acceptance = from_length(4.4, 10, "SPEED-Bench, assumed")
    plain: list[OperatingPoint] = []
    wide: list[OperatingPoint] = []
    for tensor in (1, 2, 4, 8):
        times = times_of("gpt-oss-120b", "b300", "sglang", tensor)
        predictor = Predictor(times, constants, load, 10, Split(tensor))
        plain += predictor.curve("off", BATCHES, 1, acceptance)
        wide += predictor.curve("fixed 10", BATCHES, 10, acceptance)
    end = fastest(plain)
    where = _fifteen(front(plain), front(wide), end.interactivity)
    at_end = _at(front(wide), end.interactivity)
    remark = (
        f"a wall, not a speed-up: plain decoding ends at {end.interactivity:.0f} tokens/s/user ({end.split}, batch "
        f"{end.batch}, {end.throughput:.0f} tokens/s/GPU), short of 500; DFlash gives {at_end:,.0f} there; "
        f"15x lies at {where} of that end; at equal batch, TP 8, the gain is {_equal_batch(times_of, acceptance)}"
    )
    return _line("gpt-oss-120b, 8 x B300, TensorRT-LLM: 15x at 500 to 600 tokens/s/user", 15.0, None, remark)


def _at(points: Sequence[OperatingPoint], interactivity: float) -> float:
    return max((point.throughput for point in points if point.interactivity >= interactivity), default=0.0)


def _fifteen(plain: Sequence[OperatingPoint], wide: Sequence[OperatingPoint], end: float) -> str:
    for share in range(50, 101):
        at = end * share / 100
        if _at(wide, at) >= 15 * _at(plain, at) > 0:
            return f"{share / 100:.2f}"
    return "none"


def _equal_batch(times_of: TIMES, acceptance: ExpectedAcceptance) -> str:
    predictor = Predictor(
        times_of("gpt-oss-120b", "b300", "sglang", 8),
        constants_of("tensorrt-llm", None), Load(1024, 1024), 10, Split(8),
    )  # fmt: skip
    tau = acceptance.length(10)
    ratios = [
        predictor.point("", b, 10, tau).interactivity / predictor.point("", b, 1, 1.0).interactivity
        for b in (1, 4, 16, 64)
    ]
    return " ".join(f"{ratio:.1f}x at {b}," for ratio, b in zip(ratios, (1, 4, 16, 64), strict=True)).rstrip(",")

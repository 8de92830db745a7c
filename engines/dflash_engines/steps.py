"""The steps that a recipe asks for, in order, and the sources they start from."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.errors import UserError

from .pipeline import Measured, Step, Work
from .recipe import Format, OnnxPrecision, Recipe
from .sources import Source, find_drafter, find_prompts, find_target

MODELOPT = ("nvidia-modelopt", "torch", "transformers")
ONNX = ("onnx", "onnxruntime", "onnxscript", "torch")
RTX = ("tensorrt_rtx_cu13_bindings", "tensorrt_rtx_cu13_libs")
CALIBRATION, ACCEPTANCE = "calibration prompts", "acceptance prompts"


def find_sources(recipe: Recipe) -> dict[str, Source]:
    """Target, drafter and prompts, as far as a step needs them, with digests of what they hold.

    Raises:
        UserError: one cannot be found.
    """
    deployment = recipe.deployment
    if deployment.drafter is None:
        raise UserError("no drafter to build for", where="deployment.drafter", do="name one")
    acceptance = recipe.build.acceptance
    wanted = {name for step in make_steps(recipe) for name in step.needs}
    found = {
        "target": find_target(deployment.target) if "target" in wanted else None,
        "drafter": find_drafter(deployment.drafter),
        CALIBRATION: find_prompts(recipe.build.calibration.prompts),
        ACCEPTANCE: find_prompts(acceptance.prompts if acceptance else None),
    }
    return {name: source for name, source in found.items() if source is not None}


def make_steps(recipe: Recipe) -> list[Step]:
    """Every step in an order in which each comes after what it needs."""
    return [*_calibration(recipe), *_targets(recipe), *_drafters(recipe), *_graphs(recipe), *_last(recipe)]


def _calibration(recipe: Recipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    needs_drafter_ranges = bool(build.drafter or build.onnx)
    free = build.calibration.free
    if free and (build.target or build.checkpoints):
        raise UserError("a target is calibrated on data", where="build.calibration.free", do="set it to false")
    if build.target or build.checkpoints or (needs_drafter_ranges and not free):
        given = build.calibration
        parameters = {"count": given.count, "max_tokens": given.max_tokens, "length": deployment.limits.max_model_len}
        needs = ("target", *([CALIBRATION] if given.prompts else []))
        about = "the target's own answers to the calibration prompts"

        def answers(work: Work) -> Measured:
            from .calibration import answer

            return answer(work, deployment, given)

        yield Step("answers", answers, needs, parameters, ("torch",), about=about)
    if needs_drafter_ranges:

        def ranges(work: Work) -> Measured:
            from .calibration import drafter_ranges, free_ranges

            return free_ranges(work) if free else drafter_ranges(work)

        needs = ("drafter",) if free else ("target", "drafter", "answers")
        about = "no data: activations may reach 448" if free else "how large the drafter's activations get on them"
        yield Step("drafter-ranges", ranges, needs, {"free": free}, ("torch",), 2, about)


def _targets(recipe: Recipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    for format in build.target:

        def target(work: Work, format: Format = format) -> Measured:
            from .quantize import quantize_target

            return quantize_target(work, format)

        about = "weights, activations and K/V" if format == "fp8" else "weights and activations"
        yield Step(f"target-{format}", target, ("target", "answers"), {"format": format}, MODELOPT, about=about)
    if build.checkpoints:
        wanted = build.checkpoints

        def checkpoints(work: Work) -> Measured:
            from .trtllm_checkpoint import write_checkpoints

            return write_checkpoints(work, deployment, wanted)

        parameters = {**wanted.model_dump(mode="json"), "limits": deployment.limits.model_dump(mode="json")}
        about = f"legacy: rank files for trtllm-build at tensor {', '.join(map(str, wanted.tensor))}"
        yield Step("trtllm-checkpoints", checkpoints, ("target", "answers"), parameters, MODELOPT, about=about)


def _drafters(recipe: Recipe) -> Iterator[Step]:
    for format in recipe.build.drafter:

        def drafter(work: Work, format: Format = format) -> Measured:
            from .quantize import quantize_drafter

            return quantize_drafter(work, format)

        needs = ("drafter", "drafter-ranges")
        yield Step(f"drafter-{format}", drafter, needs, {"format": format}, MODELOPT, about="in ModelOpt's layout")


def _graphs(recipe: Recipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    missing = [p for p in build.onnx if p != "fp16" and p not in build.drafter]
    if missing:
        raise UserError(f"ONNX in {missing[0]} needs the drafter in {missing[0]}", where="build.drafter", do="add it")
    if build.onnx and "fp16" not in build.onnx:
        raise UserError("the quantised graphs are made from the FP16 one", where="build.onnx", do="add fp16")
    for precision in sorted(build.onnx, key=lambda p: p != "fp16"):

        def onnx(work: Work, precision: OnnxPrecision = precision) -> Measured:
            from .onnx_export import export_fp16, export_quantized

            return export_fp16(work) if precision == "fp16" else export_quantized(work, precision)

        made = () if precision == "fp16" else ("onnx-fp16", f"drafter-{precision}")
        needs = ("drafter", "drafter-ranges", *made)
        about = "block and context graphs, checked against the core"
        yield Step(f"onnx-{precision}", onnx, needs, {"precision": precision}, ONNX, 2, about)
    for precision in build.onnx if build.rtx else ():

        def rtx(work: Work, precision: OnnxPrecision = precision) -> Measured:
            from .rtx import compile_engines

            return compile_engines(work, deployment, precision, build.rtx)

        parameters = {"compute": list(build.rtx), "limits": deployment.limits.model_dump(mode="json")}
        about = f"TensorRT-RTX engines for {', '.join(build.rtx).upper()}"
        yield Step(f"rtx-{precision}", rtx, (f"onnx-{precision}",), parameters, RTX, about=about)


def _last(recipe: Recipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    if build.commands:

        def commands(work: Work) -> Measured:
            from .commands import write_commands

            return write_commands(work, deployment, build.commands, build.onnx)

        needs = (*(f"onnx-{p}" for p in build.onnx), *(f"drafter-{f}" for f in build.drafter))
        parameters = {"kinds": list(build.commands), "limits": deployment.limits.model_dump(mode="json")}
        yield Step("commands", commands, needs, parameters, about="for SM100 and SM103: written down, not built here")
    if build.acceptance and build.acceptance.prompts:
        wanted = build.acceptance

        def acceptance(work: Work) -> Measured:
            from .acceptance import measure

            return measure(work, deployment, wanted, build.drafter)

        length = deployment.limits.max_model_len
        measured_on: dict[str, object] = {**wanted.model_dump(exclude={"prompts"}), "length": length}
        needs = ("target", "drafter", ACCEPTANCE, *(f"drafter-{format}" for format in build.drafter))
        about = "of every drafter, against bf16"
        yield Step("acceptance", acceptance, needs, measured_on, ("torch",), 2, about)

"""TensorRT-RTX engines of the drafter, compiled ahead of time on a CPU: a real TensorRT compiler, for SM75 to SM121.

It has no SM100 and no SM103 (1.7.1: `ComputeCapability`), so B200 and B300 are `commands.py`'s. Refusals are the
compiler's own and are written down: SM89 has no FP4, for one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError

from .environment import need
from .onnx_export import GRAPHS
from .recipe import Compute, OnnxPrecision
from .step import Measured, Work

BINDINGS = "tensorrt_rtx_bindings"


def compile_engines(
    work: Work, deployment: Deployment, precision: OnnxPrecision, compute: Sequence[Compute]
) -> Measured:
    """Step `rtx-fp16`, `rtx-fp8`, `rtx-nvfp4`: <graph>.<compute>.engine for every graph and device kind."""
    source = work.inputs[f"onnx-{precision}"]
    (work.folder / "drafter.json").write_bytes((source / "drafter.json").read_bytes())
    measured: Measured = {"compiler": need(BINDINGS).__version__}
    for graph in GRAPHS:
        for kind in compute:
            work.say(f"{graph} for {kind}")
            start = perf_counter()
            engine, reason = compile_one(source / f"{graph}.onnx", kind, deployment)
            entry: dict[str, object] = {"seconds": round(perf_counter() - start, 2)}
            if engine is None:
                entry["not_built"] = reason
            else:
                (work.folder / f"{graph}.{kind}.engine").write_bytes(engine)
                entry["bytes"] = len(engine)
            measured[f"{graph}.{kind}"] = entry
    built = [name for name, entry in measured.items() if isinstance(entry, dict) and "bytes" in entry]
    if not built:
        raise UserError("no engine was built", where=f"rtx-{precision}", do=json.dumps(measured))
    return measured


def compile_one(path: Path, kind: Compute, deployment: Deployment) -> tuple[bytes | None, str]:
    """The engine, or None and the compiler's reason."""
    trt = need(BINDINGS)
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        return None, str(parser.get_error(0)) if parser.num_errors else "the parser gave no reason"
    config = builder.create_builder_config()
    config.add_optimization_profile(_profile(builder, network, deployment))
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, kind.upper()), 0)
    engine = builder.build_serialized_network(network, config)
    return (None, logger.last) if engine is None else (bytes(engine), "")


def _logger(trt: Any) -> Any:
    """Keeps the last error instead of printing everything."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        last = "the compiler gave no reason"

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last = message.splitlines()[0]

    return Logger()


def _profile(builder: Any, network: Any, deployment: Deployment) -> Any:
    """Ranges of the moving axes: requests up to the batch, context up to max_model_len."""
    profile = builder.create_optimization_profile()
    batch, length = deployment.limits.max_batch_size, deployment.limits.max_model_len or 8192
    block = next(
        (network.get_input(i).shape[1] for i in range(network.num_inputs) if network.get_input(i).name == "noise"), 0
    )
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shapes = [list(tensor.shape) for _ in range(3)]
        for axis, size in enumerate(tensor.shape):
            if size == -1:
                smallest, usual, largest = _range(tensor.name, axis, batch, length, block)
                for shape, value in zip(shapes, (smallest, usual, largest), strict=True):
                    shape[axis] = value
        profile.set_shape(tensor.name, *shapes)
    return profile


def _range(name: str, axis: int, batch: int, length: int, block: int) -> tuple[int, int, int]:
    """Least, usual and largest size of an axis of the two graphs (`graph.py`)."""
    if name in ("features", "cos", "sin") and not block:
        return 1, min(batch * 8, length), length
    if name.startswith("context_") and axis == 3:
        return 1, min(1024, length), length
    if name == "mask" and axis == 3:
        return 1 + block, min(1024, length) + block, length + block
    return 1, min(batch, 8), batch

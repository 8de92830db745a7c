"""TensorRT-RTX engines of the drafter: compiled on a CPU for SM75 to SM121, and run on a GPU of their kind.

The compiler has no SM100 and no SM103 (1.7.1: `ComputeCapability`), so B200 and B300 are `commands.py`'s. Its refusals
are written down in its own words: SM89 has no FP4, for one. A run is compared with the core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_serve.checkpoint.formats import relative_error
from dflash_serve.checkpoint.manifest import verify
from dflash_serve.common.extras import import_extra
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.models.loader import load_drafter

from .graph import Sample, block_inputs, by_core, context_inputs
from .onnx_export import GRAPHS
from .pipeline import Measured, Work
from .recipe import Compute, OnnxPrecision

BINDINGS = "tensorrt_rtx_bindings"


def compile_engines(
    work: Work, deployment: Deployment, precision: OnnxPrecision, compute: Sequence[Compute]
) -> Measured:
    """Steps `rtx-fp16`, `rtx-fp8` and `rtx-nvfp4`: <graph>.<compute>.engine for every graph and device kind."""
    source = work.inputs[f"onnx-{precision}"]
    (work.folder / "drafter.json").write_bytes((source / "drafter.json").read_bytes())
    measured: Measured = {"compiler": import_extra("engines", BINDINGS).__version__}
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
    """The engine of a graph for one kind of device, or None and the compiler's reason."""
    trt = import_extra("engines", BINDINGS)
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
    """A logger that keeps the compiler's last error instead of printing everything."""

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


def compare_engine(engine: Path, drafter: Path, sample: Path) -> dict[str, float]:
    """Relative errors of an engine's outputs against the core in fp32.

    Args:
        engine: <graph>.<compute>.engine of a step `rtx-*`.
        drafter: the unquantised drafter.
        sample: output of the step `drafter-ranges`.

    Raises:
        UserError: the engine is not what was built, or no GPU of its kind is here.
    """
    raise_problems(verify(engine.parent))
    graph, kind = engine.name.split(".")[:2]
    _require_gpu(kind)
    core, blocks = load_drafter(drafter, dtype=torch.float32), Sample.load(sample)
    hidden, k, v = by_core(core, blocks)
    if graph == "block":
        inputs, wanted = block_inputs(core, blocks, k, v, torch.float16), {"hidden": hidden}
    else:
        inputs, wanted = context_inputs(core, blocks, torch.float16), {"keys": k, "values": v}
    found = run_engine(engine, inputs)
    return {name: relative_error(tensor, found[name]) for name, tensor in wanted.items()}


def _require_gpu(kind: str) -> None:
    wanted = int(kind.removeprefix("sm"))
    if not torch.cuda.is_available():
        raise UserError(
            f"no GPU here: an engine for SM{wanted} runs on one", where="run", do="copy it to such a machine"
        )
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor != wanted:
        raise UserError(
            f"this GPU is SM{major}{minor}, the engine is for SM{wanted}", where="run", do="build it for this one"
        )


def run_engine(engine: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Executes an engine once, on one stream: inputs by name -> outputs by name, in fp32."""
    trt, cuda = import_extra("engines", BINDINGS), import_module("cuda.bindings.runtime")
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    loaded = runtime.deserialize_cuda_engine(engine.read_bytes())
    context = loaded.create_execution_context()
    stream = _checked(cuda.cudaStreamCreate())
    buffers: list[Any] = []
    outputs: dict[str, tuple[Any, Any]] = {}
    try:
        for name, tensor in inputs.items():
            context.set_input_shape(name, tuple(tensor.shape))
            array = np.ascontiguousarray(tensor.numpy())
            buffers.append(_checked(cuda.cudaMalloc(array.nbytes)))
            context.set_tensor_address(name, int(buffers[-1]))
            kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
            _checked(cuda.cudaMemcpyAsync(buffers[-1], array.ctypes.data, array.nbytes, kind, stream))
        for index in range(loaded.num_io_tensors):
            name = loaded.get_tensor_name(index)
            if name in inputs:
                continue
            array = np.empty(tuple(context.get_tensor_shape(name)), dtype=trt.nptype(loaded.get_tensor_dtype(name)))
            buffers.append(_checked(cuda.cudaMalloc(array.nbytes)))
            context.set_tensor_address(name, int(buffers[-1]))
            outputs[name] = (array, buffers[-1])
        if not context.execute_async_v3(int(stream)):
            raise UserError("the engine did not run", where=str(engine), do="build it again on this machine")
        for array, pointer in outputs.values():
            kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
            _checked(cuda.cudaMemcpyAsync(array.ctypes.data, pointer, array.nbytes, kind, stream))
        _checked(cuda.cudaStreamSynchronize(stream))
    finally:
        for pointer in buffers:
            cuda.cudaFree(pointer)
        cuda.cudaStreamDestroy(stream)
    return {name: torch.from_numpy(array).float() for name, (array, _) in outputs.items()}


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of cuda-python's (error, value).

    Raises:
        RuntimeError: CUDA's error.
    """
    error, *value = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA error {error}")
    return value[0] if value else None

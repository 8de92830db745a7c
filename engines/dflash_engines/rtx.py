"""TensorRT-RTX engines of the drafter: compiled on a CPU for SM75 to SM121, and run on a GPU of their kind.

The compiler's refusals are written down in its own words: SM89 has no FP4, for one. A run is compared with the core. It
has no SM100 and no SM103 (1.7.1: `ComputeCapability`): for B200 and B300 there are commands that build the same ONNX
there, labelled as not built here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import relative_error
from dflash_serve.checkpoint.manifest import verify
from dflash_serve.common.extras import import_extra
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.models.loader import load_drafter

from .graph import GRAPHS, Sample, Shape, block_inputs, by_core, context_inputs, shape_ranges
from .pipeline import Measured, Work
from .recipe import Compute, OnnxPrecision

BINDINGS = "tensorrt_rtx_bindings"
LABEL = "not built here: TensorRT builds for the GPU that it finds, and comes from NVIDIA's own package index"


def compile_engines(
    work: Work, deployment: Deployment, precision: OnnxPrecision, compute: Sequence[Compute]
) -> Measured:
    """Steps `rtx-fp16`, `rtx-fp8` and `rtx-nvfp4`: <graph>.<compute>.engine for every graph and device kind."""
    source = work.inputs[f"onnx-{precision}"]
    (work.folder / "drafter.json").write_bytes((source / "drafter.json").read_bytes())
    measured: Measured = {"compiler": import_extra("engines", BINDINGS).__version__}
    drafter = _drafter(source)
    for graph in GRAPHS:
        ranges = shape_ranges(graph, drafter, deployment.limits)
        for kind in compute:
            work.say(f"{graph} for {kind}")
            start = perf_counter()
            engine, reason = compile_one(source / f"{graph}.onnx", kind, ranges)
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


def compile_one(
    path: Path, kind: Compute, ranges: Mapping[str, tuple[Shape, Shape, Shape]]
) -> tuple[bytes | None, str]:
    """The engine of a graph for one kind of device, or None and the compiler's reason."""
    trt = import_extra("engines", BINDINGS)
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        return None, str(parser.get_error(0)) if parser.num_errors else "the parser gave no reason"
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for name, shapes in ranges.items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
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


def write_commands(work: Work, deployment: Deployment, kinds: Sequence[str], precisions: Sequence[str]) -> Measured:
    """Step `commands`: writes commands.json and commands.sh."""
    commands: dict[str, list[str]] = {}
    for precision in precisions if "tensorrt" in kinds else ():
        drafter = _drafter(work.inputs[f"onnx-{precision}"])
        for graph in GRAPHS:
            commands[f"tensorrt {graph} {precision}"] = _trtexec(deployment, precision, graph, drafter)
    if "edge-llm" in kinds:
        commands |= _edge_llm(work.inputs)
    fields = {"label": LABEL, "commands": commands}
    (work.folder / "commands.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    lines = [f"# {name}\n{shlex.join(argv)}\n" for name, argv in commands.items()]
    (work.folder / "commands.sh").write_text("\n".join([f"# {LABEL}\n", *lines]), encoding="utf-8")
    return {"label": LABEL, "commands": len(commands)}


def _drafter(graphs: Path) -> DrafterConfig:
    """The drafter that a step `onnx-*` made its graphs of."""
    return DrafterConfig.model_validate(json.loads((graphs / "drafter.json").read_text(encoding="utf-8"))["drafter"])


def _trtexec(deployment: Deployment, precision: str, graph: str, drafter: DrafterConfig) -> list[str]:
    """trtexec of TensorRT 10.13 or later (opset 23, FP4), strongly typed: the graph says every precision."""
    argv = ["trtexec", "--stronglyTyped", "--skipInference", f"--onnx=onnx-{precision}/{graph}.onnx"]
    argv.append(f"--saveEngine={graph}.{precision}.engine")
    ranges = shape_ranges(graph, drafter, deployment.limits)
    for index, flag in enumerate(("min", "opt", "max")):
        shapes = [f"{name}:{'x'.join(map(str, shapes[index]))}" for name, shapes in ranges.items()]
        argv.append(f"--{flag}Shapes={','.join(shapes)}")
    return argv


def _edge_llm(inputs: Mapping[str, object]) -> dict[str, list[str]]:
    """TensorRT Edge-LLM 0.11: export and build of target and drafter together; it refuses tensor parallelism."""
    drafters = sorted(name for name in inputs if name.startswith("drafter-") and name != "drafter-ranges")
    commands = {}
    for name in drafters or ["drafter"]:
        export = ["tensorrt-edgellm-export", "--dflash-base", "--dflash-draft", "--dflash-draft-dir", name]
        commands[f"edge-llm export {name}"] = [*export, "TARGET", f"edge-{name}"]
        build = ["tensorrt-edgellm-build", "--spec-type", "dflash", "--draft-model-dir", f"edge-{name}/draft"]
        commands[f"edge-llm build {name}"] = [*build, f"edge-{name}/base"]
    return commands


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
    wanted = kind.upper()
    if not torch.cuda.is_available():
        raise UserError(f"no GPU here: an engine for {wanted} runs on one", where="run", do="copy it to such a machine")
    major, minor = torch.cuda.get_device_capability()
    if wanted != (found := f"SM{major}{minor}"):
        raise UserError(f"this GPU is {found}, the engine is for {wanted}", where="run", do="build it for this one")


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

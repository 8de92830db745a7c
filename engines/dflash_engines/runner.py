"""Runs a compiled drafter engine on a GPU of its kind and compares it with the core; memory by cuda-python."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_serve.checkpoint.formats import relative_error
from dflash_serve.checkpoint.manifest import verify
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.models.loader import load_drafter

from .environment import need
from .rtx import BINDINGS
from .sample import Sample, block_inputs, by_core, context_inputs


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
    """One execution: host to device, enqueue, device to host, all on one stream."""
    trt, cuda = need(BINDINGS), import_module("cuda.bindings.runtime")
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
    """cuda-python's (error, value): the value.

    Raises:
        RuntimeError: CUDA's error.
    """
    error, *value = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA error {error}")
    return value[0] if value else None

"""The drafter as ONNX: block.onnx and context.onnx in FP16, or with FP8 or NVFP4 weights, checked against the core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.formats import QuantizedTensor, relative_error
from dflash_serve.checkpoint.reader import load_weights
from dflash_serve.common.extras import import_extra
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.loader import load_drafter

from .graph import GRAPHS, Block, Context, Sample, block_inputs, by_core, context_inputs
from .pipeline import Measured, Work, quietly
from .recipe import OnnxPrecision

OPSET = 23
"""The first with FP4."""
BOUNDS = {"fp16": 0.02, "fp8": 0.2, "nvfp4": 0.4}
"""Relative error of hidden states beyond which the graph is wrong rather than coarse."""


def export_fp16(work: Work) -> Measured:
    """Step `onnx-fp16`: exports both graphs in FP16 and compares them with the core."""
    drafter = load_drafter(work.inputs["drafter"], dtype=torch.float16)
    sample = Sample.load(work.inputs["drafter-ranges"])
    reference = load_drafter(work.inputs["drafter"], dtype=torch.float32)
    _, k, v = by_core(reference, sample)
    with quietly():
        _export(Block(drafter), block_inputs(reference, sample, k, v, torch.float16), work.folder / "block.onnx")
        _export(Context(drafter), context_inputs(reference, sample, torch.float16), work.folder / "context.onnx")
    _describe(work.folder, drafter, "fp16")
    return check(work.folder, reference, sample, "fp16")


def export_quantized(work: Work, precision: OnnxPrecision) -> Measured:
    """Step `onnx-fp8` and `onnx-nvfp4`: the FP16 graphs with the quantised drafter's own numbers in them."""
    from .qdq import insert

    _, weights = load_weights(work.inputs[f"drafter-{precision}"])
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedTensor)}
    plain = load_drafter(work.inputs["drafter"], dtype=torch.float16)
    by_name = {name: tensor for name, tensor in plain.state_dict().items() if name in packed}
    counts = {}
    for name in GRAPHS:
        target = work.folder / f"{name}.onnx"
        counts[name] = insert(work.inputs["onnx-fp16"] / f"{name}.onnx", target, by_name, packed)
    reference = load_drafter(work.inputs["drafter"], dtype=torch.float32)
    _describe(work.folder, reference, precision)
    measured = check(work.folder, reference, Sample.load(work.inputs["drafter-ranges"]), precision)
    return {"quantised_products": counts, **measured}


def _export(module: nn.Module, inputs: dict[str, Tensor], path: Path) -> None:
    import_extra("engines", "onnxscript")
    dynamic, names = _dynamic(module)
    torch.onnx.export(
        module.eval(), tuple(inputs.values()), str(path), dynamo=True, external_data=False, opset_version=OPSET,
        input_names=list(inputs), output_names=names, dynamic_shapes=dynamic, verbose=False,
    )  # fmt: skip


def _dynamic(module: nn.Module) -> tuple[tuple[dict[int, Any], ...], list[str]]:
    """The axes that vary in each input, and the outputs' names."""
    if isinstance(module, Context):
        rows = torch.export.Dim("tokens", min=1, max=1 << 17)
        return ({0: rows}, {0: rows}, {0: rows}), ["keys", "values"]
    assert isinstance(module, Block)
    batch, length = torch.export.Dim("batch", min=1, max=1024), torch.export.Dim("length", min=1, max=1 << 17)
    kv = {1: batch, 3: length}
    mask = {0: batch, 3: length + module.config.block_size}
    return ({0: batch}, kv, kv, {0: batch}, {0: batch}, mask), ["hidden"]


def _describe(folder: Path, drafter: Drafter, precision: str) -> None:
    """Writes drafter.json: what running and compiling must know of the graphs."""
    fields = {"precision": precision, "opset": OPSET, "drafter": drafter.config.model_dump(mode="json")}
    (folder / "drafter.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def check(folder: Path, reference: Drafter, sample: Sample, precision: OnnxPrecision) -> Measured:
    """Runs both graphs on the sample and compares them with the core in fp32.

    Raises:
        UserError: they are farther away than the precision explains.
    """
    hidden, k, v = by_core(reference, sample)
    found_k, found_v = execute(folder / "context.onnx", context_inputs(reference, sample, torch.float16), precision)
    (found,) = execute(folder / "block.onnx", block_inputs(reference, sample, k, v, torch.float16), precision)
    errors = {"block": relative_error(hidden, found), "keys": relative_error(k, found_k)}
    errors["values"] = relative_error(v, found_v)
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] < BOUNDS[precision]:
        what = f"{worst} of the {precision} graph is {errors[worst]:.3f} away from the core"
        raise UserError(what, where=str(folder), do="report this")
    runtime = "onnxruntime" + (", FP4 weights decoded by onnx.reference" if precision == "nvfp4" else "")
    return {"relative_error": {name: round(error, 6) for name, error in errors.items()}, "checked_in": runtime}


def execute(path: Path, inputs: dict[str, Tensor], precision: OnnxPrecision) -> list[Tensor]:
    """Outputs of a graph on CPU, by onnxruntime.

    It has no FP4: those weights are decoded by onnx's own evaluator first. That evaluator cannot run the whole graph:
    it squares in fp16 where the operator says fp32, and overflows.
    """
    runtime = import_extra("engines", "onnxruntime")
    model = _without_fp4(path) if precision == "nvfp4" else path.read_bytes()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    return [torch.from_numpy(output.copy()).float() for output in session.run(None, arrays)]


def _without_fp4(path: Path) -> bytes:
    """The graph with every FP4 weight as the FP16 one that ONNX defines it to be."""
    onnx = import_extra("engines", "onnx")
    model = onnx.load(str(path))
    decode = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    rest = [node for node in model.graph.node if node.op_type != "DequantizeLinear"]
    results = [node.output[0] for node in decode if any(node.output[0] in other.input for other in rest)]
    helper, half = onnx.helper, onnx.TensorProto.FLOAT16
    read = {name for node in decode for name in node.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name in read]
    outputs = [helper.make_tensor_value_info(name, half, None) for name in results]
    small = helper.make_model(
        helper.make_graph(decode, "decode", [], outputs, constants),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    decoded = import_extra("engines", "onnx.reference").ReferenceEvaluator(small).run(None, {})
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in read]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(rest)
    weights = zip(results, decoded, strict=True)
    model.graph.initializer.extend([*kept, *(onnx.numpy_helper.from_array(array, name) for name, array in weights)])
    return bytes(model.SerializeToString())

"""Puts a quantised drafter's own numbers into its FP16 graphs, as DequantizeLinear and QuantizeLinear nodes.

FP8: weight -> DequantizeLinear -> MatMul, and the activation through Quantize and Dequantize with the calibrated scale.
NVFP4: packed weight with block scales of 16 along the input, themselves dequantised by the tensor's scale; activations
stay in FP16. A product is recognised by its weight's bytes, not by its name: exporters rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_serve.checkpoint.formats import GROUP, QuantizedTensor
from dflash_serve.common.extras import import_extra
from dflash_serve.errors import UserError


def insert(source: Path, target: Path, plain: Mapping[str, Tensor], packed: Mapping[str, QuantizedTensor]) -> int:
    """Writes `target` and returns how many products were quantised.

    Args:
        source: the FP16 graph.
        target: the graph to write.
        plain: fp16 weights [out, in] that it contains, by name.
        packed: the quantised form of each.

    Raises:
        UserError: a product of the layers was not found in the graph.
    """
    onnx = import_extra("engines", "onnx")
    model = onnx.load(str(source))
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    names = {weight.t().contiguous().numpy().tobytes(): name for name, weight in plain.items()}
    nodes: list[Any] = []
    count = 0
    for node in model.graph.node:
        weight = initializers.get(node.input[1]) if node.op_type == "MatMul" else None
        name = None if weight is None else names.get(onnx.numpy_helper.to_array(weight).tobytes())
        if name is not None:
            nodes += _quantize(onnx, model.graph, node, packed[name], f"q{count}")
            count += 1
        nodes.append(node)
    multiplied = "_proj.weight" if "block" in source.name else ("k_proj.weight", "v_proj.weight")
    expected = sum(name.endswith(multiplied) for name in plain)
    if count != expected:
        raise UserError(f"{count} of {expected} products were found in the graph", where=str(source), do="report this")
    _replace(model.graph, nodes)
    onnx.checker.check_model(model)
    onnx.save(model, str(target))
    return count


def _quantize(onnx: Any, graph: Any, node: Any, weight: QuantizedTensor, tag: str) -> list[Any]:
    """Makes the nodes that go before a MatMul, and changes its inputs to their outputs."""
    helper, kinds = onnx.helper, onnx.TensorProto
    half = {f"{tag}_scale": weight.scale if weight.format == "fp8" else weight.scale_2}
    if weight.format == "fp8" and weight.input_scale is not None:
        half[f"{tag}_input_scale"] = weight.input_scale
    for name, scale in half.items():
        assert scale is not None
        graph.initializer.append(onnx.numpy_helper.from_array(scale.reshape(()).to(torch.float16).numpy(), name))
    if weight.format == "nvfp4":
        return _nvfp4(helper, kinds, graph, node, weight, tag)
    rows, columns = weight.shape
    raw = weight.values.t().contiguous().view(torch.uint8).numpy().tobytes()
    graph.initializer.append(helper.make_tensor(f"{tag}_w", kinds.FLOAT8E4M3FN, [columns, rows], raw, raw=True))
    made = [helper.make_node("DequantizeLinear", [f"{tag}_w", f"{tag}_scale"], [f"{tag}_dq"])]
    if weight.input_scale is not None:
        graph.initializer.append(helper.make_tensor(f"{tag}_zero", kinds.FLOAT8E4M3FN, [], b"\0", raw=True))
        given = [node.input[0], f"{tag}_input_scale", f"{tag}_zero"]
        made.append(helper.make_node("QuantizeLinear", given, [f"{tag}_xq"]))
        made.append(helper.make_node("DequantizeLinear", [f"{tag}_xq", f"{tag}_input_scale"], [f"{tag}_x"]))
        node.input[0] = f"{tag}_x"
    node.input[1] = f"{tag}_dq"
    return made


def _nvfp4(helper: Any, kinds: Any, graph: Any, node: Any, weight: QuantizedTensor, tag: str) -> list[Any]:
    rows, columns = weight.shape
    # MatMul wants [in, out], and ONNX packs two neighbours of the last axis: decode the nibbles, turn, pack again.
    codes = torch.stack([weight.values & 15, weight.values >> 4], dim=-1).view(rows, columns).t().reshape(-1)
    raw = (codes[0::2] | (codes[1::2] << 4)).numpy().tobytes()
    scales = weight.scale.t().contiguous().view(torch.uint8).numpy().tobytes()
    graph.initializer.append(helper.make_tensor(f"{tag}_w", kinds.FLOAT4E2M1, [columns, rows], raw, raw=True))
    shape = [columns // GROUP, rows]
    graph.initializer.append(helper.make_tensor(f"{tag}_blocks", kinds.FLOAT8E4M3FN, shape, scales, raw=True))
    node.input[1] = f"{tag}_dq"
    return [
        helper.make_node("DequantizeLinear", [f"{tag}_blocks", f"{tag}_scale"], [f"{tag}_b"]),
        helper.make_node("DequantizeLinear", [f"{tag}_w", f"{tag}_b"], [f"{tag}_dq"], axis=0, block_size=GROUP),
    ]


def _replace(graph: Any, nodes: list[Any]) -> None:
    """Gives the graph the new nodes, and keeps only the initializers that one of them reads."""
    read = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.initializer[:]
    graph.initializer.extend(kept)

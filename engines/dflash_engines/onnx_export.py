"""The drafter's block pass as ONNX in FP16, checked against the core on a CPU; nothing serves it.

It says in plain operators what a drafter computes, for whoever ports it. An engine of it would copy the whole padded
context K/V in for every block, for it has no cache of its own: serve with trtllm-serve, SGLang or vLLM. Positions come
in as cosines and sines (`sin` signed, as by the core's RotaryEmbedding), windows, causality and ragged lengths as one
additive mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.checkpoint.formats import relative_error
from dflash_serve.common.extras import import_extra
from dflash_serve.errors import UserError
from dflash_serve.models.attention import block_mask
from dflash_serve.models.drafter import Attention, Drafter
from dflash_serve.models.layers import RMSNorm
from dflash_serve.models.loader import load_drafter

from .pipeline import Measured, Work, quietly
from .sample import Sample, by_core

OPSET, CPU = 23, "CPUExecutionProvider"
BOUND = 0.02
"""Relative error beyond which the graph is wrong rather than rounded."""


def export_and_check(work: Work) -> Measured:
    """Step `onnx`: block.onnx, run by onnxruntime and compared with the core in fp32.

    Raises:
        UserError: it is farther away than FP16 explains.
    """
    sample, path = Sample.load(work.inputs["drafter-ranges"]), work.folder / "block.onnx"
    core = load_drafter(work.inputs["drafter"], dtype=torch.float32)
    block = Block(load_drafter(work.inputs["drafter"], dtype=torch.float16)).eval()
    hidden, k, v = by_core(core, sample)
    inputs = block_inputs(core, sample, k, v, torch.float16)
    import_extra("engines", "onnxscript")
    with quietly():
        torch.onnx.export(
            block, tuple(inputs.values()), str(path), dynamo=True, external_data=False, opset_version=OPSET,
            input_names=list(inputs), output_names=["hidden"], dynamic_shapes=_dynamic(block.config), verbose=False,
        )  # fmt: skip
    error = relative_error(hidden, execute(path, inputs))
    if not error < BOUND:
        raise UserError(f"the graph is {error:.3f} away from the core", where=str(path), do="report this")
    return {"relative_error": {"block": round(error, 6)}}


def _dynamic(config: DrafterConfig) -> tuple[dict[int, Any], ...]:
    """The axes that vary in each input: requests, and tokens of context."""
    batch, length = torch.export.Dim("batch", min=1, max=1024), torch.export.Dim("length", min=1, max=1 << 17)
    kv = {1: batch, 3: length}
    return {0: batch}, kv, kv, {0: batch}, {0: batch}, {0: batch, 3: length + config.block_size}


def execute(path: Path, inputs: dict[str, Tensor]) -> Tensor:
    """A graph's output on CPU, by onnxruntime, in fp32."""
    session = import_extra("engines", "onnxruntime").InferenceSession(path.read_bytes(), providers=[CPU])
    (output,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return torch.from_numpy(output.copy()).float()


def norm(module: RMSNorm, x: Tensor) -> Tensor:
    """RMS norm in fp32, as F.rms_norm computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps)
    return wide.to(x.dtype) * module.weight


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The core's `rotate` without roll: halves (a, b) -> (a, b) cos + (b, a) sin, sin signed."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([b, a], dim=-1) * sin


def single_kind(config: DrafterConfig) -> AttentionKind:
    """The one kind that all layers have.

    Raises:
        UserError: there are several, and so would be the masks.
    """
    kinds = set(config.layers)
    if len(kinds) > 1:
        what = "layers of several kinds (windowed and full) would need a mask each"
        raise UserError(what, where="build.onnx", do="leave it out for this drafter")
    return kinds.pop()


class Block(nn.Module):
    """Blocks in, hidden states out: [b, B, H] -> [b, B, H].

    Context K/V [layers, b, kv_heads, s, head_dim]; cos, sin [b, 1, B, head_dim]; mask [b, 1, B, s + B].
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        single_kind(drafter.config)
        self.drafter, self.config = drafter, drafter.config

    def forward(
        self, noise: Tensor, context_k: Tensor, context_v: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        h = noise
        for index, layer in enumerate(self.drafter.layers):
            x = norm(layer.input_layernorm, h)
            attended = self._attend(layer.self_attn, x, context_k[index], context_v[index], cos, sin, mask)
            h = h + layer.self_attn.o_proj(attended)
            x = norm(layer.post_attention_layernorm, h)
            h = h + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
        return norm(self.drafter.norm, h)

    def _attend(
        self, attention: Attention, x: Tensor, past_k: Tensor, past_v: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        config, dim = self.config, self.config.head_dim
        groups = config.num_attention_heads // config.num_key_value_heads
        batch, block = x.shape[0], config.block_size
        q = norm(attention.q_norm, attention.q_proj(x).view(batch, block, -1, dim)).transpose(1, 2)
        k = norm(attention.k_norm, attention.k_proj(x).view(batch, block, -1, dim)).transpose(1, 2)
        v = attention.v_proj(x).view(batch, block, -1, dim).transpose(1, 2)
        keys = torch.cat([past_k, rotate_halves(k, cos, sin)], dim=2).repeat_interleave(groups, dim=1)
        values = torch.cat([past_v, v], dim=2).repeat_interleave(groups, dim=1)
        # Scaled before the product: fp16 overflows at 65504.
        scores = (rotate_halves(q, cos, sin) * dim**-0.5) @ keys.transpose(-1, -2)
        weights = torch.softmax(scores.float() + mask.float(), dim=-1).to(x.dtype)
        return (weights @ values).transpose(1, 2).reshape(batch, block, -1)


def dense_mask(lengths: Sequence[int], capacity: int, config: DrafterConfig) -> Tensor:
    """Additive mask [b, 1, B, capacity + B] of blocks whose contexts have these lengths, padded to `capacity`."""
    kind, block = single_kind(config), config.block_size
    rows = []
    for length in lengths:
        keys = torch.cat([torch.arange(capacity), torch.arange(length, length + block)])
        visible = block_mask(torch.arange(length, length + block), keys, kind)
        seen = torch.ones(block, len(keys), dtype=torch.bool) if visible is None else visible
        seen[:, length:capacity] = False
        rows.append(torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")))
    # -inf times 0 is NaN in some kernels, and fp16 has it: a large negative number does as well.
    return torch.stack(rows)[:, None].clamp(min=-30000.0)


def block_inputs(drafter: Drafter, sample: Sample, k: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs of `Block` for the sample, contexts padded to the longest."""
    config, capacity = drafter.config, max(sample.anchors)
    past_k, past_v = (_padded(tensor, sample.anchors, capacity) for tensor in (k, v))
    positions = torch.tensor(sample.anchors)[:, None] + torch.arange(config.block_size)
    cos, sin = (t.view(*positions.shape, -1)[:, None] for t in drafter.rotary(positions.flatten()))
    mask = dense_mask(sample.anchors, capacity, config)
    named = {"noise": sample.noise, "context_k": past_k, "context_v": past_v, "cos": cos, "sin": sin, "mask": mask}
    return {name: tensor.to(dtype) for name, tensor in named.items()}


def _padded(kv: Tensor, anchors: Sequence[int], capacity: int) -> Tensor:
    """[tokens, layers, kv, dim] -> [layers, blocks, kv, capacity, dim], zero behind each anchor."""
    dense = kv[:capacity].permute(1, 2, 0, 3)[:, None].repeat(1, len(anchors), 1, 1, 1)
    for index, anchor in enumerate(anchors):
        dense[:, index, :, anchor:] = 0
    return dense

"""Rank files go back together to the model they were cut from, at any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_engines.trtllm_checkpoint import build_command, reassemble
from dflash_serve.deployment import Deployment

HEADS, KV, DIM, HIDDEN, INNER, VOCAB = 8, 2, 4, 16, 32, 64


def whole_model() -> dict[str, Tensor]:
    """One Llama layer under Hugging Face's names."""
    room = "model.layers.0"
    shapes = {
        "model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,),
        f"{room}.input_layernorm": (HIDDEN,), f"{room}.post_attention_layernorm": (HIDDEN,),
        f"{room}.self_attn.q_proj": (HEADS * DIM, HIDDEN), f"{room}.self_attn.k_proj": (KV * DIM, HIDDEN),
        f"{room}.self_attn.v_proj": (KV * DIM, HIDDEN), f"{room}.self_attn.o_proj": (HIDDEN, HEADS * DIM),
        f"{room}.mlp.gate_proj": (INNER, HIDDEN), f"{room}.mlp.up_proj": (INNER, HIDDEN),
        f"{room}.mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_ranks(folder: Path, model: dict[str, Tensor], size: int, scale: float) -> None:
    """As TensorRT-LLM splits it: columns of q, k, v, gate and up, rows of the others; K/V heads repeat if need be."""
    config = {
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_size": DIM, "vocab_size": VOCAB,
        "num_hidden_layers": 1, "mapping": {"tp_size": size},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    ours, theirs = "model.layers.0", "transformer.layers.0"
    for rank in range(size):

        def part(name: str, axis: int, rank: int = rank) -> Tensor:
            tensor = model[f"{name}.weight"]
            if name.endswith(("k_proj", "v_proj")) and size > KV:
                tensor = tensor.view(KV, DIM, HIDDEN).repeat_interleave(size // KV, 0).view(-1, HIDDEN)
            return tensor.chunk(size, dim=axis)[rank].contiguous()

        tensors = {
            "transformer.vocab_embedding.weight": part("model.embed_tokens", 0),
            "lm_head.weight": part("lm_head", 0),
            "transformer.ln_f.weight": model["model.norm.weight"],
            f"{theirs}.input_layernorm.weight": model[f"{ours}.input_layernorm.weight"],
            f"{theirs}.post_layernorm.weight": model[f"{ours}.post_attention_layernorm.weight"],
            f"{theirs}.attention.qkv.weight": torch.cat([part(f"{ours}.self_attn.{n}_proj", 0) for n in "qkv"]) / scale,
            f"{theirs}.attention.qkv.weights_scaling_factor": torch.tensor([scale]),
            f"{theirs}.attention.dense.weight": part(f"{ours}.self_attn.o_proj", 1),
            f"{theirs}.mlp.fc.weight": part(f"{ours}.mlp.gate_proj", 0),
            f"{theirs}.mlp.gate.weight": part(f"{ours}.mlp.up_proj", 0),
            f"{theirs}.mlp.proj.weight": part(f"{ours}.mlp.down_proj", 1),
        }
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / f"rank{rank}.safetensors")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_go_back_together(size: int, tmp_path: Path) -> None:
    model = whole_model()
    write_ranks(tmp_path, model, size, scale=0.5)
    found = reassemble(tmp_path)
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        torch.testing.assert_close(found[name], tensor)


def test_the_command_builds_one_engine_a_rank() -> None:
    deployment = Deployment.model_validate(
        {"target": {"model": "t"}, "limits": {"max_batch_size": 4, "max_model_len": 512}}
    )
    argv = build_command(Path("/x/tp4"), deployment, 4, "fp8")
    assert argv == [
        "trtllm-build", "--checkpoint_dir", "tp4", "--output_dir", "tp4-engine", "--max_batch_size", "4",
        "--max_seq_len", "512", "--max_num_tokens", "8192", "--gemm_plugin", "auto", "--workers", "4",
        "--use_fp8_context_fmha", "enable",
    ]  # fmt: skip

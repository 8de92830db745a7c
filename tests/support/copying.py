"""A tiny pair whose drafts are accepted as a trained one's are: the drafter repeats the anchor, the target often does.

The weights are chosen, because training takes a minute. The target's head is its embedding, so the row of the last
token, which the residual stream carries beside the layers, makes this token likely. Two of the drafter's heads of
attention look at the block's anchor alone and hand its row on. The other two are random and see the context.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash_serve.checkpoint.writer import write_drafter
from tests.support.tiny import FULL, random_tensors, tiny_drafter_config
from tests.support.tiny_target import SPECIALS, write_tiny_target

MASK = SPECIALS.index("<mask>")
HEAD = 32  # The least that vLLM's attention takes on a CPU
SHARPNESS = 5.0  # Of the target's head: at temperature 1 one token in four repeats the last one


def write_copying_pair(folder: Path, *, positions: int, block_size: int = 8) -> tuple[Path, Path]:
    """Writes a Qwen3 target and its drafter; returns their folders."""
    target = write_tiny_target(folder / "target", family="qwen3", positions=positions, head_dim=HEAD)
    weights = load_file(target / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    rows[:, 0], rows[MASK, 0] = 1, -1  # tells tokens from masks
    weights["lm_head.weight"] = SHARPNESS * rows
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = tiny_drafter_config(
        block_size=block_size,
        num_target_layers=4,
        target_layer_ids=(0, 1, 2),
        mask_token_id=MASK,
        vocab_size=json.loads((target / "config.json").read_text())["vocab_size"],
        head_dim=HEAD,
        layers=(FULL,),
        max_position_embeddings=positions,
    )
    tensors, layer = random_tensors(config), "layers.0.self_attn"
    slow = HEAD // 2 - 1  # the dimension that RoPE turns least: keys there are the same at every position
    queries, keys, values, outputs = (tensors[f"{layer}.{name}_proj.weight"] for name in ("q", "k", "v", "o"))
    queries[: 2 * HEAD], keys[:HEAD], values[:HEAD] = 0, 0, torch.eye(HEAD)
    queries[[slow, HEAD + slow], 0], keys[slow, 0] = -1, 1  # a mask asks for what is no mask
    outputs[:, : 2 * HEAD] = torch.eye(HEAD).repeat(1, 2)
    tensors["fc.weight"][0] = 0  # no key of the context, whose tokens they would see
    for name in ("q_norm", "k_norm"):
        tensors[f"{layer}.{name}.weight"].fill_(1.5)
    write_drafter(folder / "drafter", config, tensors, dialect="zlab")
    return target, folder / "drafter"

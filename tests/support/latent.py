"""Tiny drafters with latent attention, with the keys of Inferact/Kimi-K3-DSpark's config.json (TorchSpec's)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_serve.checkpoint.config import expected_tensors
from dflash_serve.checkpoint.dialects.latent import NAMES
from dflash_serve.checkpoint.reader import parse
from tests.unit.checkpoint.published_heads import KIMI_DSPARK

TINY = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 12, "target_hidden_size": 32, "target_num_hidden_layers": 4},
    **{"num_target_layers": 2, "target_layer_ids": [0, 2], "mask_token_id": 3, "markov_rank": 8},
    "max_position_embeddings": 512,
}
BLOCK_SIZE = 4  # B; the published file has none


def write_latent_drafter(folder: Path, vocab_size: int = 96) -> dict[str, Tensor]:
    """Writes config.json and weights under their published names, with a copy of the embedding; returns the weights."""
    sizes = {"vocab_size": vocab_size, "draft_vocab_size": vocab_size}
    raw = {**KIMI_DSPARK, **TINY, **sizes}
    config, _ = parse(raw, folder / "config.json", [], block_size=BLOCK_SIZE)
    assert config is not None
    generator = torch.Generator().manual_seed(0)
    tensors = {
        NAMES.get(name, name): torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in expected_tensors(config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    embedding = torch.randn(vocab_size, config.hidden_size, generator=generator).to(torch.bfloat16)
    save_file({**tensors, "embed_tokens.weight": embedding}, folder / "model.safetensors")
    return tensors

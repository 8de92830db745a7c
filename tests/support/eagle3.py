"""A tiny random EAGLE-3 head for a target, in the form that SGLang and vLLM load (one layer, 2H wide at its input)."""

from __future__ import annotations

import json
from pathlib import Path

SHARED = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
LAYERS = [0, 1, 2]  # of the target, whose outputs `fc` joins


def write_eagle3_head(folder: Path, target: Path) -> Path:
    """Writes config.json and random weights, with the target's embedding and head: drafts are words of its own."""
    import torch
    from safetensors.torch import load_file, save_file

    raw = json.loads((target / "config.json").read_text())
    config = {
        **{name: raw[name] for name in SHARED if name in raw},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw.get("max_position_embeddings", 256),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, wide, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = raw["num_attention_heads"] * dim, raw["num_key_value_heads"] * dim
    shapes = {
        "fc.weight": (hidden, len(LAYERS) * hidden),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    own = load_file(target / "model.safetensors")
    tensors |= {"embed_tokens.weight": own["model.embed_tokens.weight"], "lm_head.weight": own["lm_head.weight"]}
    save_file(tensors, folder / "model.safetensors")
    return folder

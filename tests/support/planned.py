"""Pairs to plan for, by their published sizes; no weights, no network."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, uniform_target_layer_ids
from dflash_serve.checkpoint.target import read_target_layout
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.planning.pair import read_pair
from dflash_serve.planning.step_times import Pair
from tests.unit.tensorrt_llm.published_targets import TARGETS

DRAFTERS = {
    "Qwen/Qwen3-8B": (5, 4096, 12288, 32, 8, 128, 5, 151936, 36),
    "openai/gpt-oss-120b": (8, 2880, 7680, 64, 8, 64, 5, 201088, 36),
}


def planned_pair(folder: Path, name: str = "Qwen/Qwen3-8B") -> Pair:
    """A target and its drafter."""
    depth, hidden, wide, heads, kv_heads, head_dim, features, vocabulary, layers = DRAFTERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGETS[name]))
    model = Model(model=name)
    drafter = DrafterConfig(
        block_size=16, target_layer_ids=uniform_target_layer_ids(layers, features), mask_token_id=0,
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, layers=(AttentionKind(),) * depth,
    )  # fmt: skip
    return Pair(model, folder, read_target_layout(folder, model), drafter)


def shipped_pair(name: str) -> Pair:
    """A target as the operator tables' library has it, and a drafter of the usual shape."""
    return read_pair(Deployment(target=Model(model=name)))


def hybrid_target(folder: Path) -> Path:
    """A folder with the configuration of a target with gated delta nets of the sizes of Qwen3.5-27B."""
    sizes = {
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "full_attention_interval": 4, "num_hidden_layers": 64,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TARGETS["Qwen/Qwen3-8B"], **sizes}))
    return folder

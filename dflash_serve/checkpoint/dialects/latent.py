"""The dialect of DSpark drafters with latent attention: architecture `K3DSparkModel`, as TorchSpec writes it.

`Inferact/Kimi-K3-DSpark` is one, and vLLM has its class (`transformers_utils/configs/k3_dspark.py`,
`models/kimi_k3/nvidia/dspark_mla.py`). All keys are at top level, with DeepSeek-V3's names for the attention.
`num_target_layers` is the number of `target_layer_ids` here, and `target_num_hidden_layers` the target's depth. Slots
are anchor-first, and every row of a block sees the whole block. RoPE pairs neighbours, as in DeepSeek-V3: only vLLM
computes with these weights, so their rows stay as they are. The published file has no `block_size`.
"""

from __future__ import annotations

from collections.abc import Collection

from dflash_serve.checkpoint.config import PLAIN_DRAFTER, AttentionKind, DrafterConfig, LatentConfig
from dflash_serve.checkpoint.dialects.keys import (
    UNKNOWN,
    WRITTEN_ANYWAY,
    Dialect,
    inexpressible,
    markov_keys,
    read_block_size,
    read_depth,
    read_heads,
    read_rope,
    read_slots,
    refuse_parts,
)
from dflash_serve.checkpoint.section import ConfigSection

NAME = "k3-dspark"
ARCHITECTURE, MODEL_TYPE = "K3DSparkModel", "k3_dspark"
ROPE_THETA = 50000.0  # of vLLM's class, where the file has none
RANKS = tuple(LatentConfig.model_fields)
SAME_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "mask_token_id")
NOT_IN_ITS_CLASS = ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor")
"""Switches that change the computation, and which vLLM's class refuses."""
EXPERTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
KEYS = {
    *(*RANKS, *SAME_NAMES, *NOT_IN_ITS_CLASS, *EXPERTS, *WRITTEN_ANYWAY, "num_key_value_heads", "num_hidden_layers"),
    *("num_target_layers", "target_num_hidden_layers", "target_hidden_size", "target_layer_ids", "draft_vocab_size"),
    *("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling", "hidden_act"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "block_size"),
    *("sample_from_anchor", "attention_bias", "attention_mode"),
}
NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})


def matches(config: ConfigSection) -> bool:
    """config.json is of this class."""
    return ARCHITECTURE in config.architectures or config.given("model_type", str) == MODEL_TYPE


def read(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from a K3DSparkModel's config.json."""
    config.only(KEYS, UNKNOWN)
    for key in NOT_IN_ITS_CLASS:
        config.refuse(key, (False,), "vLLM's class of these drafters has no such part", PLAIN_DRAFTER)
    for key in EXPERTS:
        config.refuse(key, (0,), "experts in a drafter are not supported", PLAIN_DRAFTER)
    config.refuse("attention_bias", (False,), "a bias in latent attention is not supported", PLAIN_DRAFTER)
    config.refuse("hidden_act", ("silu",), "DFlash drafters use silu")
    sizes = {key: config.integer(key) for key in SAME_NAMES if key != "mask_token_id"}
    same = "the drafter takes the target's embedding and head, so the sizes must agree"
    config.refuse("target_hidden_size", (sizes["hidden_size"],), f"hidden_size is {sizes['hidden_size']}; {same}")
    config.refuse("draft_vocab_size", (sizes["vocab_size"],), f"vocab_size is {sizes['vocab_size']}; {same}")
    ids = config.integers("target_layer_ids")
    if ids is None and not config.has("target_layer_ids"):
        config.note("no target_layer_ids", "add the target layers that it was trained with, each by its 0-based id")
    config.refuse("num_target_layers", (len(ids or ()),), f"target_layer_ids names {len(ids or ())} layers")
    latent = LatentConfig(**{key: config.integer(key) for key in RANKS})
    slots = read_slots(config, "anchor-first")
    return {
        **sizes,
        **read_heads(config, stored),
        "num_key_value_heads": config.integer("num_key_value_heads", sizes["num_attention_heads"]),
        "head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        "latent": latent,
        "layers": (AttentionKind(),) * read_depth(config),
        "block_size": read_block_size(config, slots),
        "slots": slots,
        "target_layer_ids": ids or (0,),
        "num_target_layers": config.optional_integer("target_num_hidden_layers"),
        "mask_token_id": config.integer("mask_token_id", minimum=0),
        "max_position_embeddings": config.optional_integer("max_position_embeddings"),
        "rms_norm_eps": config.positive("rms_norm_eps"),
        "rope": read_rope(config, ROPE_THETA, head_dim=latent.qk_rope_head_dim),
    }


def write(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as vLLM's class reads it, with the block size, which it takes for its number of drafted tokens."""
    if config.latent is None:
        raise inexpressible("grouped-query attention", NAME)
    refuse_parts(config, NAME, "a drafter without a Markov head", "a reduced draft vocabulary", "attention sinks")
    refuse_parts(config, NAME, "convolutions", "a candidate selector", "a mask embedding", "an embedding scale")
    refuse_parts(config, NAME, "an output multiplier", "a soft-cap of the logits")
    if set(config.layers) != {AttentionKind()}:
        raise inexpressible("windows, or layers that are causal in the block", NAME)
    depth = config.num_target_layers
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **config.model_dump(include={*SAME_NAMES, "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"}),
        **config.latent.model_dump(),
        "num_hidden_layers": config.num_layers,
        "block_size": config.rows(),
        "sample_from_anchor": config.slots == "anchor-first",
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": len(config.target_layer_ids),
        "target_hidden_size": config.hidden_size,
        **({} if depth is None else {"target_num_hidden_layers": depth}),
        "draft_vocab_size": config.vocab_size,
        **markov_keys(config),
        "rope_theta": config.rope.theta,
        "rope_parameters": config.rope.parameters,
        "tie_word_embeddings": False,
    }


DIALECT = Dialect(NAME, matches, read, write, COPIES, NAMES)

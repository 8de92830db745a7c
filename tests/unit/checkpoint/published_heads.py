"""The config.json of every drafter in our catalogue, in the dialect it was published in.

What public pages tell is as they tell it (kinds, block sizes, ranks, vocabularies, layer ids, sizes of Qwen3); other
sizes are plausible, and only their shape matters here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dflash_serve.checkpoint.catalogue import CataloguedDrafter, catalogue
from dflash_serve.checkpoint.source import BUNDLED_HEAD, WITH_HEAD
from tests.unit.checkpoint.published import KIMI, PUBLISHED, QWEN3, QWEN35, SLIDING, Published

Raw = dict[str, object]
MINIMAX = (200063, 200064)
BY_NAME = {row.name: row for row in PUBLISHED}
MARKOV = {"markov_rank": 256, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


@dataclass(frozen=True)
class TargetSizes:
    """What a drafter takes over from its target."""

    hidden: int
    intermediate: int
    heads: tuple[int, int]
    depth: int
    vocabulary: tuple[int, int] = QWEN3
    """(mask_token_id, vocab_size)"""


TARGETS = {
    "Qwen/Qwen3-4B": TargetSizes(2560, 9728, (32, 8), 36),
    "Qwen/Qwen3-8B": TargetSizes(4096, 12288, (32, 8), 36),
    "Qwen/Qwen3-14B": TargetSizes(5120, 17408, (40, 8), 40),
    "Qwen/Qwen3-30B-A3B": TargetSizes(2048, 6144, (32, 4), 48),
    "Qwen/Qwen3.5-0.8B": TargetSizes(1024, 3584, (16, 8), 24, (248077, 248320)),
    "Qwen/Qwen3.6-35B-A3B": TargetSizes(2048, 6144, (32, 8), 40, QWEN35),
    "Qwen/Qwen3.8-27B": TargetSizes(5120, 17408, (32, 8), 64, QWEN35),
    "Qwen/Qwen3.8-2.4T-A95B": TargetSizes(8192, 24576, (64, 8), 94, QWEN35),
    "google/gemma-4-12B-it": TargetSizes(3840, 15360, (16, 8), 48, (4, 262144)),
    "google/gemma-4-31B-it": TargetSizes(5376, 10752, (64, 8), 60, (4, 262144)),
    "zai-org/GLM-5.2": TargetSizes(5120, 12288, (64, 8), 92, (151330, 151552)),
    "zai-org/GLM-5.3-Flash": TargetSizes(4096, 10944, (32, 8), 46, (151330, 151552)),
    "deepseek-ai/DeepSeek-V4-Flash": TargetSizes(4096, 12288, (64, 8), 43, (128815, 129280)),
    "meta-llama/Llama-3.2-1B-Instruct": TargetSizes(2048, 8192, (32, 8), 16, (128002, 128256)),
    "Qwen/Qwen3.5-397B-A17B": TargetSizes(4096, 12288, (32, 8), 60, QWEN35),
    "MiniMaxAI/MiniMax-M2.7": TargetSizes(3072, 9216, (48, 8), 62, MINIMAX),
    "MiniMaxAI/MiniMax-M3": TargetSizes(6144, 12288, (32, 8), 60, MINIMAX),
    "moonshotai/Kimi-K2.6": TargetSizes(7168, 18432, (56, 8), 61, KIMI),
    "moonshotai/Kimi-K3": TargetSizes(7168, 14336, (64, 16), 93, KIMI),
    "moonshotai/Kimi-K3.1-Pro": TargetSizes(7168, 14336, (64, 16), 93, KIMI),
    "meta-models/Muse-Glimmer-30B": TargetSizes(6656, 19968, (32, 8), 52, (201818, 202048)),
    "zai-org/GLM-5.3": TargetSizes(6144, 12288, (64, 64), 78, (154856, 154880)),
    "LiquidAI/LFM2.5-1.2B-Instruct": TargetSizes(2048, 6144, (32, 8), 16, (16, 65536)),
    "LiquidAI/LFM2.5-2.6B": TargetSizes(2048, 6144, (32, 8), 30, (16, 128000)),
    "LiquidAI/LFM2.5-8B-A1B": TargetSizes(2048, 6144, (32, 8), 24, (16, 128000)),
    "LiquidAI/LFM2.5-24B-A2B": TargetSizes(2048, 6144, (32, 8), 40, (16, 128000)),
    "smollm2": TargetSizes(576, 1536, (9, 3), 30, (16, 49152)),
}


MUSE_GLIMMER: Raw = {
    **{"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "hidden_size": 6656},
    **{"intermediate_size": 19968, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"num_hidden_layers": 5, "layer_types": [SLIDING] * 5, "sliding_window": 2048, "hidden_act": "silu"},
    **{"attention_dropout": 0, "block_size": 16, "bos_token_id": 200000, "eos_token_id": 200001},
    **{"mask_token_id": 201818, "max_position_embeddings": 131072, "pad_token_id": 200018, "rms_norm_eps": 1e-5},
    **{"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "dtype": "bfloat16"},
    **{"target_layer_ids": [1, 13, 25, 37, 49], "transformers_version": "5.15.0.dev0"},
}
"""The file lacks keys that are fixed in the class of transformers, such as the vocabulary size."""


NEMOTRON_DSPARK: Raw = {
    **{"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 8},
    **{"hidden_size": 2688, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 2},
    **{"num_hidden_layers": 6, "head_dim": 128, "layer_types": [SLIDING] * 6, "sliding_window": 1024},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_parameters": None, "rope_theta": 10000, "vocab_size": 131072},
    **{"max_position_embeddings": 1048576, "dtype": "bfloat16", "use_cache": False, "transformers_version": "5.5.3"},
    **{
        "markov_head_type": "vanilla",
        "markov_rank": 512,
        "dspark_fixup_head_type": "markov",
        "dspark_markov_rank": 512,
    },
    **{"mask_token_id": 990, "pard_token": 990, "draft_vocab_size": None, "attention_sink_bias": True},
    **{"sample_from_anchor": False, "dspark_bonus_anchor": True, "dflash_query_causal": True},
    **{"eagle_aux_hidden_state_layer_ids": [2, 6, 20, 30, 42, 52], "target_layer_ids": [1, 5, 19, 29, 41, 51]},
    **{"num_aux_layers": 6, "has_embed_tokens": True, "has_lm_head": False, "train_embed_tokens": False},
    "dflash_config": {
        **{"attention_sink_bias": True, "causal": True, "mask_token_id": 990, "swa_window_size": 1024},
        **{"target_layer_ids": [1, 5, 19, 29, 41, 51], "use_swa": True, "sample_from_anchor": False},
    },
}
"""NVIDIA-Nemotron-3.5-Lightning's, without its quantisation."""
NEMOTRON_DFLASH: Raw = {
    **{key: value for key, value in NEMOTRON_DSPARK.items() if key not in ("block_size", "markov_rank")},
    **{"architectures": ["DFlashDraftModel"], "layer_types": ["full_attention"] * 6, "sliding_window": None},
    **{"dspark_fixup_head_type": None, "dspark_markov_rank": None, "dspark_bonus_anchor": None},
    **{"attention_sink_bias": False, "dflash_query_causal": False, "markov_head_type": None},
    "rope_parameters": {
        **{"factor": 128.0, "original_max_position_embeddings": 8192, "rope_theta": 10000, "rope_type": "yarn"},
    },
    "dflash_config": {
        **{"attention_sink_bias": False, "causal": False, "mask_token_id": 990, "use_swa": False},
        **{"target_layer_ids": [1, 5, 19, 29, 41, 51], "sample_from_anchor": False},
    },
}
"""Its plain sibling's, which has no sinks, and no block_size."""


KIMI_DSPARK: Raw = {
    **{"architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": 7168, "intermediate_size": 14336},
    **{"num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 64, **LATENT},
    **{"mla_use_nope": False, "mla_use_output_gate": False, "vocab_size": 163840, "rms_norm_eps": 1e-05},
    **{"max_position_embeddings": 1048576, "rope_theta": 50000.0, "num_target_layers": 5, "target_hidden_size": 7168},
    **{"target_num_hidden_layers": 93, "target_layer_ids": [2, 23, 47, 71, 89], "mask_token_id": 163837},
    **{"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, **MARKOV, **CONFIDENCE},
    **{"tie_word_embeddings": False, "draft_vocab_size": 163840, "_torchspec_version": "0.1.0"},
    "torch_dtype": "bfloat16",
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768, "rope_theta": 50000.0},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
"""Inferact/Kimi-K3-DSpark's, which has latent attention, and no block_size."""


def config_json(drafter: CataloguedDrafter) -> Raw:
    """Its config.json."""
    owner, _, name = drafter.repository.rpartition("/")
    name = name.partition("-W4A16-")[0]  # a quantised copy
    if name in BY_NAME:
        return BY_NAME[name].config_json()
    if owner == "Inferact":
        return KIMI_DSPARK
    if owner == "meta-models":
        return MUSE_GLIMMER
    if "Nemotron" in name:
        return NEMOTRON_DSPARK if "DSpark" in name else NEMOTRON_DFLASH
    if drafter.repository == WITH_HEAD:
        raw: Raw = json.loads((BUNDLED_HEAD / "config.json").read_text())
        return raw
    plain = _plain(drafter)
    if "Domino" in name:
        inner = {"projector_type": "domino", "shift_label": True, "emb_dim": 256, "gru_hidden_dim": 1024}
        return {**plain, "dflash_config": {**_section(plain), **inner}}
    if owner in ("deepseek-ai", "LiquidAI"):
        return _deepspec(drafter, plain)
    if "speculator." in name or owner == "novita":
        return _speculators(drafter, plain)
    if owner == "nvidia":
        return _modelopt(drafter, plain)
    if drafter.kind == "DSpark":  # SpecForge's form
        inner = {**_section(plain), **MARKOV, **CONFIDENCE, "projector_type": "dspark", "attention_mode": "gqa"}
        return {**plain, "architectures": ["DSparkDraftModel"], "block_size": 7, "dflash_config": inner}
    if drafter.kind == "DFlash2":
        inner = {**_section(plain), **DFLASH2, "block_size": drafter.block_size}
        latent = {**LATENT} if owner == "lightseekorg" else {}
        inner |= {"attention_mode": "mla"} if latent else {}
        sliding = {"layer_types": [SLIDING] * 5, "sliding_window": 2048, "use_sliding_window": True, "is_causal": False}
        return {**plain, **sliding, **latent, "architectures": ["DFlash2DraftModel"], "dflash_config": inner}
    return plain


def _plain(drafter: CataloguedDrafter) -> Raw:
    assert drafter.block_size is not None
    sizes = TARGETS[drafter.target]
    ids = [1 + index * (sizes.depth - 4) // 4 for index in range(5)]
    row = Published(
        drafter.repository, 5, sizes.hidden, sizes.intermediate, sizes.heads, drafter.block_size, ids, sizes.depth, 0.0,
        sizes.vocabulary,
    )  # fmt: skip
    return row.config_json()


def _section(raw: Raw) -> Raw:
    section = raw["dflash_config"]
    assert isinstance(section, dict)
    return section


def _deepspec(drafter: CataloguedDrafter, plain: Raw) -> Raw:
    """DeepSpec's: everything at top level, no key for the slots."""
    owner = drafter.repository.partition("/")[0]
    gemma = "gemma" in drafter.repository
    assert drafter.block_size is not None
    heads = {**MARKOV, **CONFIDENCE} if drafter.kind == "DSpark" else {"markov_rank": 0}
    inner = _section(plain)
    outer = {key: value for key, value in plain.items() if key != "dflash_config"}
    named = "Lfm2DSparkDraftModel" if owner == "LiquidAI" else "Qwen3DSparkModel"
    named = "Gemma4DSparkModel" if gemma else named
    more = {"rope_is_neox_style": False} if owner == "LiquidAI" else {}
    own = {"architectures": [named], "block_size": drafter.block_size - 1, "num_anchors": 512}
    return {**outer, **inner, **heads, **more, **own}


def _modelopt(drafter: CataloguedDrafter, plain: Raw) -> Raw:
    """ModelOpt's, with the architecture that NVIDIA's DSpark drafters name."""
    inner = {**_section(plain), "use_swa": True, "swa_window_size": 1024, "causal": False}
    assert drafter.block_size is not None
    if drafter.kind != "DSpark":
        return {**plain, "dflash_config": inner}
    rows = drafter.block_size - 1
    inner |= {**MARKOV, "use_confidence_head": True, "projector_type": "dspark", "shift_label": True}
    inner["block_size"] = rows
    sliding = {"layer_types": [SLIDING] * 5, "sliding_window": 1024, "use_sliding_window": True}
    return {**plain, **sliding, "architectures": ["Qwen3DSparkModel"], "block_size": rows, "dflash_config": inner}


def _speculators(drafter: CataloguedDrafter, plain: Raw) -> Raw:
    """speculators 0.9's; its DSpark exports have no key for the slots, but say how much they draft."""
    assert drafter.heads is not None
    assert drafter.block_size is not None
    kind = drafter.kind.lower()
    inner = _section(plain)
    ids = inner["target_layer_ids"]
    assert isinstance(ids, list)
    rows = drafter.block_size - (drafter.heads.slots == "anchor-first")
    transformer = {
        key: value
        for key, value in plain.items()
        if key not in ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers")
    }
    if "DeepSeek-V4" in drafter.target:  # its features are those of four residual streams
        transformer["hc_mult"] = 4
    by_kind: dict[str, Raw] = {"dspark": {**MARKOV, **CONFIDENCE}, "dflash2": dict(DFLASH2)}
    heads = by_kind.get(kind, {"sample_from_anchor": False})
    return {
        "architectures": [f"{drafter.kind}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": rows,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [index + 1 for index in ids],
        "draft_vocab_size": drafter.heads.draft_vocabulary or plain["vocab_size"],
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": drafter.block_size - 1}]},
        "transformer_layer_config": transformer,
        **heads,
    }


PUBLISHED_DRAFTERS = [one for one in catalogue().drafters if one.heads is not None]
"""Drafters whose config.json is known."""

"""The meaning of each dialect's keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.checkpoint.reader import DIALECTS, read_config
from tests.support.heads import HEADS
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, edit_json, tiny_drafter_config

TWO = tiny_drafter_config()
MIXED = tiny_drafter_config(layers=(SLIDING, FULL))
CAUSAL = AttentionKind(causal=True)
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
WIDE = AttentionKind(window=9), AttentionKind(window=9, causal=True)
Keys = dict[str, object]
SWA: Keys = {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 9}
CONFIDENT = dict(HEADS["Markov and confidence"])
QUARTER = {"partial_rotary_factor": 0.25}
QWEN35: Keys = {
    **{
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "full_attention_interval": 4,
    },
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
    **{"linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"},
    **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, **QUARTER},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        **QUARTER,
    },
}
"""Keys that DeepSpec copies from a Qwen3.5 target into its drafter."""
COPIED = {key: value for key, value in QWEN35.items() if key not in ("model_type", "rope_parameters")}
QWEN3_MOE: Keys = {
    **{"decoder_sparse_step": 1, "mlp_only_layers": [0], "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "shared_expert_intermediate_size": 512,
}


def raw(dialect: str, config: DrafterConfig = TWO) -> Keys:
    return DIALECTS[dialect].write(config, None)


READ: dict[str, tuple[Keys, Keys, tuple[str, ...], Keys]] = {
    "z-lab of August, from dflash_config first": (
        raw("zlab"),
        {"dflash_config.block_size": 8, "dflash_config.input_embedding_scale": 2.5, "output_multiplier": 0.5},
        ("block_size",),
        {"block_size": 8, "embedding_scale": 2.5, "output_multiplier": 0.5},
    ),
    "a soft-cap": (raw("zlab"), {"final_logit_softcapping": 30.0}, (), {"final_logit_softcap": 30.0}),
    "a soft-cap of zero is none": (raw("zlab"), {"final_logit_softcapping": 0.0}, (), {"final_logit_softcap": None}),
    "DeepSpec, all at top level": (
        raw("zlab"),
        {"target_layer_ids": [0, 7], "mask_token_id": 5},
        ("dflash_config", "architectures"),
        {"target_layer_ids": (0, 7), "mask_token_id": 5},
    ),
    **{
        f"keys that {dialect}'s trainers copy from a target": (
            raw(dialect, tiny_drafter_config(**(CONFIDENT if dialect == "specforge" else {}))),
            {prefix + key: value for key, value in {**COPIED, **QWEN3_MOE}.items()},
            (),
            {"rope": {"theta": 1e4}},
        )
        for dialect, prefix in {
            **dict.fromkeys((name for name in DIALECTS if name != "k3-dspark"), ""),
            "speculators": "transformer_layer_config.",
        }.items()
    },
    "a sliding layer is causal": (raw("zlab", MIXED), {"is_causal": None}, (), {"layers": (SLIDING, FULL)}),
    "is_causal false": (raw("zlab", MIXED), {"is_causal": False}, (), {"layers": (SLIDING_BOTH_WAYS, FULL)}),
    "is_causal true": (raw("zlab", MIXED), {"is_causal": True}, (), {"layers": (SLIDING, CAUSAL)}),
    "speculators' full layers are bidirectional": (
        raw("speculators", MIXED), {"sliding_window_non_causal": False}, (), {"layers": (SLIDING, FULL)}
    ),
    "speculators, non-causal": (
        raw("speculators", MIXED), {"sliding_window_non_causal": True}, (), {"layers": (SLIDING_BOTH_WAYS, FULL)}
    ),
    **{
        f"ModelOpt's windows hold although layer_types say full, causal {kind.causal}": (
            raw("zlab"),
            {**SWA, "dflash_config.causal": kind.causal},
            ("is_causal",),
            {"layers": (kind, kind)},
        )
        for kind in WIDE
    },
    "ModelOpt's window is that of layers which slide": (
        raw("zlab"),
        {**SWA, "layer_types": ["sliding_attention", "full_attention"]},
        ("use_sliding_window", "is_causal"),
        {"layers": (WIDE[1], FULL)},
    ),
    "Qwen's windows without layer_types begin at max_window_layers": (
        raw("zlab"),
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5},
        ("layer_types", "is_causal"),
        {"layers": (FULL, AttentionKind(window=5, causal=True))},
    ),
    "RoPE of transformers 4": (
        raw("zlab"),
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        (),
        {"rope": {"theta": 5e5, "scaling": "yarn", **YARN}},
    ),
    "RoPE of transformers 5": (
        raw("zlab"),
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
        ("rope_theta", "rope_scaling"),
        {"rope": {"theta": 5e5, "scaling": "yarn", **YARN}},
    ),
    "a qwen3 config without head_dim has 128 as everywhere": (raw("zlab"), {}, ("head_dim",), {"head_dim": 128}),
    "keys that transformers writes are harmless": (
        raw("zlab"),
        {"_name_or_path": "x", "pad_token_id": 1, "pruned_heads": {}, "top_k": 50, "is_decoder": False},
        (),
        {},
    ),
    "and so they are inside speculators' own": (
        raw("speculators"),
        {"transformer_layer_config.num_beams": 1, "transformer_layer_config.bad_words_ids": []},
        (),
        {},
    ),
    "and so is how speculators trained": (
        raw("speculators"),
        {"has_no_defaults_at_init": False, "transformer_layer_config.flex_attention_backend": "FLASH"},
        (),
        {},
    ),
    "speculators' class of DSpark": (
        raw("speculators", tiny_drafter_config(**CONFIDENT)), {"architectures": ["DSparkDraftModel"]}, (), CONFIDENT
    ),
    "NeMo Automodel's class": (
        raw("zlab"),
        {"architectures": ["Qwen3DFlashDraftModel"], "dflash_config.block_size": 4, "is_causal": False},
        (),
        {"block_size": 4, "layers": (FULL, FULL)},
    ),
    "NeMo Automodel's class of DFlash2": (
        raw("zlab", tiny_drafter_config(**HEADS["DFlash2"])),
        {"architectures": ["Qwen3DFlash2DraftModel"]},
        (),
        dict(HEADS["DFlash2"]),
    ),
    "a Qwen3.5 target's keys, and its partial rotation, which no trainer applies": (
        raw("deepspec", tiny_drafter_config(**CONFIDENT)),
        QWEN35,
        ("rope_theta", "rope_scaling"),
        {"rope": {"theta": 1e7}, **CONFIDENT},
    ),
    "and those of a target with experts": (raw("deepspec"), QWEN3_MOE, (), {"rope": {"theta": 1e4}}),
    "a partial rotation inside speculators' own": (
        raw("speculators"),
        {"transformer_layer_config.rope_parameters": {"rope_theta": 1e7, **QUARTER}},
        (),
        {"rope": {"theta": 1e7}},
    ),
    "SGLang's rope_dim supersedes it": (
        raw("zlab"),
        {"rope_scaling": {"type": "yarn", **YARN, **QUARTER, "rope_dim": 16}},
        (),
        {"rope": {"theta": 1e4, "scaling": "yarn", **YARN}},
    ),
    "DSpark's keys in a section of their own": (
        {**raw("specforge", tiny_drafter_config(**CONFIDENT)), "mask_token_id": 7, "markov_rank": 6},
        {
            "dspark_config.markov_rank": 6,
            "dspark_config.markov_head_type": "vanilla",
            "dspark_config.target_layer_ids": [0, 2, 4],
            "dspark_config.enable_confidence_head": True,
            "dspark_config.confidence_head_with_markov": True,
            "dflash_config": {"attention_mode": "gqa", "projector_type": "dspark", "mask_token_id": 7},
        },
        (),
        {**CONFIDENT, "target_layer_ids": (0, 2, 4), "mask_token_id": 7},
    ),
    "a reduced vocabulary beside z-lab's keys, which vLLM reads": (
        raw("zlab"), {"draft_vocab_size": 40}, (), {"draft_vocabulary": 40}
    ),
    "and the whole one": (raw("specforge", tiny_drafter_config(**CONFIDENT)), {"draft_vocab_size": 96}, (), CONFIDENT),
    "LiquidAI's drafters, whose confidence head reads Markov embeddings unsaid": (
        raw("deepspec", tiny_drafter_config(**CONFIDENT)),
        {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False},
        ("confidence_head_with_markov",),
        CONFIDENT,
    ),
    "NVIDIA's DSpark drafters: ModelOpt's keys under DeepSpec's architecture": (
        raw("modelopt", tiny_drafter_config(**CONFIDENT)), {"architectures": ["Qwen3DSparkModel"]}, (), CONFIDENT,
    ),
    "halves are rotated, as ever": (raw("zlab"), {"is_neox_style": True, "rope_is_neox_style": True}, (), {}),
    "a third name of the slot convention, at top level": (
        raw("zlab"), {"query_zero_predicts_next": True}, ("sample_from_anchor",),
        {"slots": "anchor-first", "block_size": 5},
    ),
    "a third name of the slot convention, nested": (
        raw("zlab"), {"dflash_config.query_zero_predicts_next": True}, ("sample_from_anchor",),
        {"slots": "anchor-first", "block_size": 5},
    ),
    "a third name of the slot convention, DeepSpec": (
        raw("deepspec"), {"query_zero_predicts_next": False}, ("sample_from_anchor",), {},
    ),
    "RoPE by layer type": (
        raw("zlab"),
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}, "sliding_attention": {"rope_theta": 1e4}},
         "rope_theta": 5e5, "rope_scaling": None},
        (),
        {"rope": {"theta": 5e5, "scaling": "yarn", **YARN}},
    ),
}  # fmt: skip
"""A config.json, changes of it, keys to remove -> the fields that are then read otherwise."""


@pytest.mark.parametrize(("start", "change", "remove", "expected"), READ.values(), ids=READ)
def test_a_key_is_read_as_its_authors_mean_it(
    start: Keys, change: Keys, remove: tuple[str, ...], expected: Keys, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(start))
    edit_json(path, change, remove=remove)
    found = read_config(tmp_path)[0]
    wanted = tiny_drafter_config(**expected)
    assert {name: getattr(found, name) for name in expected} == {name: getattr(wanted, name) for name in expected}

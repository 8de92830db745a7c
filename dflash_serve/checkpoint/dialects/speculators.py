"""The speculators dialect (vllm-project/speculators 0.9, `DFlashSpeculatorConfig`).

The transformer is nested in `transformer_layer_config`. `aux_hidden_state_layer_ids` index Hugging Face's
hidden_states, whose entry 0 is the embedding: they are our ids + 1. Full-attention layers are always bidirectional
inside the block; sliding ones are causal unless `sliding_window_non_causal`. vLLM 0.32 and 0.33 take that key for every
layer (`speculators/algos.py:124`), so it is written as true wherever no layer is causal.
"""

from __future__ import annotations

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects.dialect import (
    ConfigSection,
    Dialect,
    inexpressible,
    one_value,
    refuse_other_slots,
)
from dflash_serve.checkpoint.dialects.transformer_keys import (
    make_kinds,
    read_transformer,
    read_windows,
    rope_parameters,
    write_transformer,
)
from dflash_serve.checkpoint.dialects.zlab import check_architecture

NAME = "speculators"
DEPTH_KEY = "num_target_layers"
"""Ours: speculators allows extra keys and would otherwise forget the depth of the target."""
KEYS = {
    *("speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config"),
    *("architectures", "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sliding_window_non_causal"),
    *("draft_vocab_size", "target_hidden_size", "sample_from_anchor", "shift_label", "projector_type", DEPTH_KEY),
}
HEADS = {"pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"}
"""Defaults of heads that projector_type switches on."""
TRAINING = {"lambda_base_start", "lambda_base_decay_ratio", "auf", "max_anchors"}
WRITTEN_ANYWAY = {
    *("_name_or_path", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward"),
    *("dtype", "torch_dtype", "id2label", "label2id", "is_encoder_decoder", "model_type", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "transformers_version"),
}
"""By transformers, for every model."""
COPIES = frozenset({"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"})


def matches(config: ConfigSection) -> bool:
    """Whether a config.json speaks this dialect."""
    return config.has("speculators_model_type")


def read(config: ConfigSection, has_mask_embedding: bool) -> dict[str, object]:
    """DrafterConfig's fields of a speculators config.json."""
    if config.raw["speculators_model_type"] != "dflash":
        config.refuse("speculators_model_type", ("dflash",), "only DFlash speculators are supported")
        return {}
    known = KEYS | HEADS | TRAINING | WRITTEN_ANYWAY
    config.only(known, "it may change what the drafter computes; remove it if it does not")
    check_architecture(config)
    refuse_other_slots(config)
    inner = config.section("transformer_layer_config")
    _check_vocabulary(config, inner.integer("vocab_size"))
    config.refuse(
        "target_hidden_size",
        (inner.integer("hidden_size"),),
        "its features are not as wide as the drafter",
        "use a drafter of the target's hidden size",
    )
    block_size = config.integer("block_size", minimum=2)
    _check_proposal(config, block_size)
    return {
        **read_transformer(inner),
        "block_size": block_size,
        "target_layer_ids": _layer_ids(config),
        "num_target_layers": config.optional_integer(DEPTH_KEY),
        "mask_token_id": config.integer("mask_token_id", minimum=0),
        "layers": make_kinds(read_windows(inner), False if config.flag("sliding_window_non_causal") else None),
    }


def _layer_ids(config: ConfigSection) -> tuple[int, ...]:
    """0 would be the embedding's own output, which no DFlash drafter reads."""
    shifted = config.integers("aux_hidden_state_layer_ids", minimum=1)
    if shifted is None and not config.has("aux_hidden_state_layer_ids"):
        config.note("no aux_hidden_state_layer_ids", "add the target layers it was trained with, each 0-based id + 1")
    return tuple(index - 1 for index in shifted or (1,))


def _check_vocabulary(config: ConfigSection, vocab_size: int) -> None:
    draft = config.optional_integer("draft_vocab_size")
    if draft is not None and draft != vocab_size:
        config.note(
            f"reduced draft vocabulary ({draft} of {vocab_size} tokens): it needs a head of its own, but we, "
            "SGLang and TensorRT-LLM draft through the target's",
            "train with draft_vocab_size = vocab_size",
        )


def _check_proposal(config: ConfigSection, block_size: int) -> None:
    """speculative_tokens counts what follows the anchor, so B - 1 at most; more means slot 0 predicts too (DSpark)."""
    methods = config.section("speculators_config").raw.get("proposal_methods")
    for method in methods if isinstance(methods, list) else ():
        count = method.get("speculative_tokens") if isinstance(method, dict) else None
        if isinstance(count, int) and count > block_size - 1:
            config.note(
                f"speculative_tokens is {count} but a block of {block_size} has {block_size - 1} masked slots",
                "correct block_size or speculative_tokens",
            )


def write(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as speculators 0.9 saves it."""
    _check_expressible(config)
    one_value({kind.window for kind in config.layers} - {None}, "windows", NAME)
    causal = one_value({kind.causal for kind in config.layers if kind.window is not None}, "causality", NAME)
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        "draft_vocab_size": config.vocab_size,
        "sliding_window_non_causal": not causal,
        **({} if config.num_target_layers is None else {DEPTH_KEY: config.num_target_layers}),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": write_transformer(config, {"rope_parameters": rope_parameters(config.rope)}),
    }


def _check_expressible(config: DrafterConfig) -> None:
    """Says what this dialect has no key for."""
    inexpressibles = {
        "a mask embedding": config.has_mask_embedding,
        "an embedding scale": config.embedding_scale != 1.0,
        "an output multiplier": config.output_multiplier != 1.0,
        "a soft-cap of the logits": config.final_logit_softcap is not None,
        "full-attention layers that are causal": any(kind.causal and kind.window is None for kind in config.layers),
    }
    for what, present in inexpressibles.items():
        if present:
            raise inexpressible(what, NAME)


DIALECT = Dialect(NAME, matches, read, write, COPIES)

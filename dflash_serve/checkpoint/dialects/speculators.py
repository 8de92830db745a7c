"""The speculators dialect (vllm-project/speculators 0.9: `DFlash-`, `DFlash2-` and `DSparkSpeculatorConfig`).

The transformer is nested in `transformer_layer_config`. `aux_hidden_state_layer_ids` index Hugging Face's
hidden_states, whose entry 0 is the embedding: they are our ids + 1. Full-attention layers are always bidirectional
inside the block; sliding ones are causal unless `sliding_window_non_causal`. vLLM 0.32 and 0.33 take that key for every
layer (`speculators/algos.py:124`), so it is written as true wherever no layer is causal.

A DSpark export without `sample_from_anchor` is anchor-first to speculators and fill-in to vLLM: its number of drafted
tokens (`speculative_tokens`) decides.
"""

from __future__ import annotations

from collections.abc import Collection

from dflash_serve.checkpoint.config import DrafterConfig, Slots
from dflash_serve.checkpoint.dialects.keys import (
    DRAFTER_KEYS,
    HEAD_KEYS,
    SLOT_KEYS,
    UNKNOWN,
    WRITTEN_ANYWAY,
    Dialect,
    check_architecture,
    dflash2_keys,
    make_kinds,
    markov_keys,
    one_value,
    read_block_size,
    read_draft_vocabulary,
    read_heads,
    read_slots,
    read_transformer,
    read_windows,
    refuse_other_attention,
    refuse_parts,
    write_transformer,
)
from dflash_serve.checkpoint.section import ConfigSection

NAME = "speculators"
DEPTH_KEY = "num_target_layers"
"""A key of ours for the depth of the target, which speculators does not have; it allows extra keys."""
ARCHITECTURES = {"dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
"""speculators_model_type -> the architecture that is written."""
KNOWN_ARCHITECTURES = (
    *ARCHITECTURES.values(),
    *("DFlashDraftModel", "DSparkDraftModel", "DFlash2Speculator", "Qwen3DSparkModel"),
)
"""speculators itself writes the names of its classes, `...DraftModel`."""
KEYS = {
    *("speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config"),
    *("architectures", "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sliding_window_non_causal"),
    *("draft_vocab_size", "target_hidden_size", "projector_type", DEPTH_KEY),
    *HEAD_KEYS,
}
HEADS = {"pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"}
"""Keys with defaults of heads that projector_type enables."""
TRAINING = {
    *("lambda_base_start", "lambda_base_decay_ratio", "auf", "max_anchors"),
    *("num_anchors", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"),
}
COPIES = frozenset({"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d"})
"""Tensors that repeat the target's (`lm_head` only with the target's vocabulary), and `t2d`, which repeats d2t."""


def matches(config: ConfigSection) -> bool:
    """config.json is in speculators' dialect."""
    return config.has("speculators_model_type")


def read(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from a speculators config.json."""
    kind = config.given("speculators_model_type", str)
    if kind not in ARCHITECTURES:
        config.refuse("speculators_model_type", tuple(ARCHITECTURES), "only DFlash speculators are supported")
        return {}
    config.only(KEYS | HEADS | TRAINING | WRITTEN_ANYWAY, UNKNOWN)
    check_architecture(config, KNOWN_ARCHITECTURES)
    refuse_other_attention(config)
    inner = config.section("transformer_layer_config")
    inner.only(DRAFTER_KEYS, UNKNOWN)
    config.refuse(
        "target_hidden_size",
        (inner.integer("hidden_size"),),
        "its features are not as wide as the drafter",
        "use a drafter of the target's hidden size",
    )
    slots = _slots(config, kind)
    block_size = read_block_size(config, slots)
    _check_proposal(config, block_size)
    non_causal = config.given("sliding_window_non_causal", bool)
    return {
        **read_transformer(inner),
        **read_heads(config, stored, markov_kind="vanilla"),
        "block_size": block_size,
        "slots": slots,
        "draft_vocabulary": read_draft_vocabulary(config, inner.integer("vocab_size")),
        "target_layer_ids": _layer_ids(config),
        "num_target_layers": config.optional_integer(DEPTH_KEY),
        "mask_token_id": config.integer("mask_token_id", minimum=0),
        "layers": make_kinds(
            read_windows(inner), False if non_causal or (kind == "dflash2" and non_causal is None) else None
        ),
    }


def _slots(config: ConfigSection, kind: str) -> Slots:
    # By the key, else by the export's number of drafted tokens; plain DFlash and DFlash2 are fill-in.
    if any(map(config.has, SLOT_KEYS)) or kind != "dspark":
        return read_slots(config, "fill-in")
    rows, counts = config.integer("block_size"), set(_speculative_tokens(config))
    if counts == {rows}:
        return "anchor-first"
    if counts != {rows - 1}:
        what = f"no sample_from_anchor, and speculative_tokens {sorted(counts)} beside block_size {rows} does not tell"
        config.note(what, "add what it was trained with: true = the anchor's row predicts, too")
    return "fill-in"


def _layer_ids(config: ConfigSection) -> tuple[int, ...]:
    # 0 would be the output of the embedding, which no DFlash drafter reads.
    shifted = config.integers("aux_hidden_state_layer_ids", minimum=1)
    if shifted is None and not config.has("aux_hidden_state_layer_ids"):
        config.note("no aux_hidden_state_layer_ids", "add the target layers it was trained with, each 0-based id + 1")
    return tuple(index - 1 for index in shifted or (1,))


def _speculative_tokens(config: ConfigSection) -> list[int]:
    methods = config.section("speculators_config").raw.get("proposal_methods")
    counts = (
        [method.get("speculative_tokens") for method in methods or () if isinstance(method, dict)]
        if isinstance(methods, list)
        else []
    )
    return [count for count in counts if isinstance(count, int)]


def _check_proposal(config: ConfigSection, block_size: int) -> None:
    # speculative_tokens does not count the anchor, so it is B - 1 at most; more means another slot convention.
    for count in _speculative_tokens(config):
        if count > block_size - 1:
            config.note(
                f"speculative_tokens is {count} but a block of {block_size} has {block_size - 1} slots to draft",
                "correct block_size, speculative_tokens or sample_from_anchor",
            )


def write(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as speculators 0.9 saves it."""
    refuse_parts(
        config,
        NAME,
        *("a mask embedding", "an embedding scale", "an output multiplier", "a soft-cap of the logits"),
        *(
            "attention sinks",
            "latent attention (MLA)",
            "convolutions without a candidate selector",
            "convolutions beside a Markov head",
        ),
        "full-attention layers that are causal",
    )
    one_value({kind.window for kind in config.layers} - {None}, "windows", NAME)
    causal = one_value({kind.causal for kind in config.layers if kind.window is not None}, "causality", NAME)
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    kind = "dflash" if config.family == "DFlash" and config.confidence is None else "dspark"
    kind = "dflash2" if config.selector is not None else kind
    return {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": config.rows(),
        "sample_from_anchor": config.slots == "anchor-first",
        **(markov_keys(config) if kind == "dspark" else dflash2_keys(config)),
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        "draft_vocab_size": config.draft_vocabulary or config.vocab_size,
        "sliding_window_non_causal": not causal,
        **({} if config.num_target_layers is None else {DEPTH_KEY: config.num_target_layers}),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": write_transformer(config, {"rope_parameters": config.rope.parameters}),
    }


DIALECT = Dialect(NAME, matches, read, write, COPIES)

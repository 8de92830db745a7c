"""Reading and writing of config.json: what a dialect is, and the keys that several dialects share.

A dialect is one published way of describing a drafter in config.json; the registry is `reader.DIALECTS`. Shared are the
keys of heads and slot convention, and those of the transformer (Qwen3Config).

Nothing is guessed. Some missing keys mean opposite things to two readers; then the checkpoint's other keys or its
tensors decide, or the drafter is refused: an engine would silently load the wrong reading and accept nothing.
RoPE is read and written as transformers 5's `rope_parameters`, or as the older `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import cast, get_args

from dflash_serve.checkpoint.config import (
    BUILD,
    FULL,
    MOST_LAYERS,
    PLAIN_DRAFTER,
    SLIDING,
    AttentionKind,
    ConfidenceConfig,
    ConvolutionConfig,
    DrafterConfig,
    MarkovConfig,
    MarkovKind,
    RopeConfig,
    SelectorConfig,
    Slots,
)
from dflash_serve.checkpoint.section import ConfigSection
from dflash_serve.errors import UserError


@dataclass(frozen=True)
class Dialect:
    """Reader and writer of one dialect of config.json. Most names of tensors are equal in all dialects."""

    name: str
    matches: Callable[[ConfigSection], bool]
    read: Callable[[ConfigSection, Collection[str]], dict[str, object]]
    """(config.json, names of the stored tensors) -> fields of a DrafterConfig; faults become problems."""
    write: Callable[[DrafterConfig, str | None], dict[str, object]]
    """(drafter, the target's name if known) -> config.json; UserError if the dialect cannot describe the drafter."""
    copies_of_target: frozenset[str] = frozenset()  # names of tensors that repeat the target's and are skipped
    names: Mapping[str, str] = field(default_factory=dict)  # our names of tensors -> the dialect's, where they differ


def one_value(values: Set[object], what: str, dialect: str) -> object:
    """The single value of a set; None for an empty set.

    Raises:
        UserError: there are several, which the dialect cannot describe.
    """
    if len(values) > 1:
        raise inexpressible(f"layers with different {what} ({', '.join(map(str, sorted(values, key=str)))})", dialect)
    return next(iter(values), None)


def inexpressible(what: str, dialect: str) -> UserError:
    """The error for a drafter that a dialect cannot describe."""
    return UserError(f"the {dialect} dialect has no way to write {what}", where="--to", do="choose another dialect")


def refuse_other_attention(config: ConfigSection) -> None:
    """Adds problems for attention that is not supported."""
    config.refuse("attention_mode", ("gqa", "mha"), "only grouped-query attention is supported", PLAIN_DRAFTER)
    config.refuse("attention_value_scale", (1,), "scaled attention values are not supported yet", PLAIN_DRAFTER)
    kinds = ("dflash", "dspark", "dflash2")
    config.refuse("projector_type", kinds, "only DFlash, DFlash2 and DSpark are supported", PLAIN_DRAFTER)


SINKS = "attention_sink_bias"


def read_sinks(config: ConfigSection) -> bool:
    """The drafter's layers have attention sinks; the second name is MiMo's."""
    return config.either(SINKS, "add_swa_attention_sink_bias", bool) is True


OWN_EMBEDDING = "a drafter with an embedding of its own is not supported yet"


def refuse_own_embedding(config: ConfigSection) -> None:
    """Adds a problem for a drafter whose embedding was trained, or may have been; a frozen one is the target's."""
    if not embedding_is_copied(config.raw):
        config.refuse("has_embed_tokens", (False,), OWN_EMBEDDING, PLAIN_DRAFTER)


def embedding_is_copied(raw: Mapping[str, object]) -> bool:
    """A config.json says that the drafter's embedding is the target's, which its training left as it was (NVIDIA)."""
    return raw.get("has_embed_tokens") is True and raw.get("train_embed_tokens") is False


MARKOV_KEYS = {
    *("markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head"),
    *("confidence_head_with_markov", "confidence_head_alpha"),
}
DFLASH2_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
SLOT_KEYS = {"sample_from_anchor", "shift_label", "query_zero_predicts_next"}
"""Names of one switch: the anchor's row predicts slot 1 (sglang#40144 has the third)."""
HEAD_KEYS = MARKOV_KEYS | DFLASH2_KEYS | SLOT_KEYS


def read_heads(config: ConfigSection, stored: Collection[str], *, markov_kind: str | None = None) -> dict[str, object]:
    """`markov`, `confidence`, `convolution` and `selector` of a DrafterConfig.

    Args:
        config: the section with the keys.
        stored: names of the checkpoint's tensors; empty if only its configuration is there.
        markov_kind: meaning of a missing markov_head_type in this dialect; None = the key is required.
    """
    markov = _markov(config, markov_kind)
    convolution, selector = (
        _together(config, "conv_kernel_size", "conv_group_size"),
        _together(config, "selector_rank", "selector_top_k"),
    )
    return {
        "markov": markov,
        "confidence": _confidence(config, stored, markov),
        "attention_sinks": read_sinks(config),
        "convolution": convolution and ConvolutionConfig(taps=convolution[0], group_size=convolution[1]),
        "selector": selector and SelectorConfig(rank=selector[0], top_k=selector[1]),
    }


def read_slots(config: ConfigSection, default: Slots) -> Slots:
    """The slot convention; `default` is the one of this dialect's own code without a key."""
    told = {key: value for key in sorted(SLOT_KEYS) if (value := config.given(key, bool)) is not None}
    if len(set(told.values())) > 1:
        said = " but ".join(f"{config.named(key)} is {value}" for key, value in told.items())
        config.note(said, "keep the right one")
    return default if not told else "anchor-first" if all(told.values()) else "fill-in"


def _markov(config: ConfigSection, default: str | None) -> MarkovConfig | None:
    rank = config.optional_integer("markov_rank", minimum=0)
    if not rank:
        return None
    kind = config.given("markov_head_type", str) or default
    if kind is None:
        do = "add what it was trained with: vanilla, gated or rnn"
        config.note(f"{config.named('markov_rank')} is {rank}, but there is no markov_head_type", do)
        return None
    if kind.lower() not in get_args(MarkovKind):
        do = f"supported are: {', '.join(get_args(MarkovKind))}"
        config.note(f"{config.named('markov_head_type')} is {kind!r}, which is not supported", do)
        return None
    return MarkovConfig(kind=cast(MarkovKind, kind.lower()), rank=rank)


def _confidence(config: ConfigSection, stored: Collection[str], markov: MarkovConfig | None) -> ConfidenceConfig | None:
    # A missing switch means on in SGLang and off in speculators, so the tensors decide.
    told = config.either("enable_confidence_head", "use_confidence_head", bool)
    present = any(name.startswith("confidence_head.") for name in stored) if told is None else told
    if not present:
        return None
    with_markov = config.given("confidence_head_with_markov", bool)
    if with_markov is None:
        with_markov = markov is not None  # as in SGLang; the width of its tensor is checked
    return ConfidenceConfig(with_markov=with_markov)


def _together(config: ConfigSection, *keys: str) -> tuple[int, int] | None:
    # Both sizes are given or none; engines write 0 for none.
    first, second = (config.optional_integer(key, minimum=0) or 0 for key in keys)
    if bool(first) != bool(second):
        here, missing = keys if first else keys[::-1]
        config.note(f"{config.named(here)} without {missing}", f"add {missing}, or remove {here}")
        return None
    return (first, second) if first else None


def markov_keys(config: DrafterConfig) -> dict[str, object]:
    """Keys of the Markov and confidence heads, also of absent ones."""
    markov, confidence = config.markov, config.confidence
    return {
        "markov_rank": markov.rank if markov else 0,
        "markov_head_type": markov.kind if markov else "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.with_markov,
    }


def dflash2_keys(config: DrafterConfig) -> dict[str, object]:
    """Keys of convolution and selector; {} for a drafter without them."""
    keys: dict[str, object] = {}
    if config.convolution is not None:
        keys |= {"conv_kernel_size": config.convolution.taps, "conv_group_size": config.convolution.group_size}
    if config.selector is not None:
        keys |= {"selector_rank": config.selector.rank, "selector_top_k": config.selector.top_k}
    return keys


PARTS: Mapping[str, Callable[[DrafterConfig], bool]] = {
    "anchor-first slots": lambda config: config.slots != "fill-in",
    "a reduced draft vocabulary": lambda config: config.draft_vocabulary is not None,
    "a Markov head": lambda config: config.markov is not None,
    "a drafter without a Markov head": lambda config: config.markov is None,
    "a confidence head": lambda config: config.confidence is not None,
    "attention sinks": lambda config: config.attention_sinks,
    "latent attention (MLA)": lambda config: config.latent is not None,
    "convolutions": lambda config: config.convolution is not None,
    "convolutions without a candidate selector": lambda config: config.convolution is not None and not config.selector,
    "convolutions beside a Markov head": lambda config: config.convolution is not None and config.markov is not None,
    "a candidate selector": lambda config: config.selector is not None,
    "a mask embedding": lambda config: config.has_mask_embedding,
    "an embedding scale": lambda config: config.embedding_scale != 1.0,
    "an output multiplier": lambda config: config.output_multiplier != 1.0,
    "a soft-cap of the logits": lambda config: config.final_logit_softcap is not None,
    "full-attention layers that are causal": lambda config: any(k.causal and k.window is None for k in config.layers),
}
"""Parts of a drafter that some dialects cannot describe."""


def refuse_parts(config: DrafterConfig, dialect: str, *parts: str) -> None:
    """Refuses a drafter with one of these `PARTS`.

    Raises:
        UserError: the drafter has one.
    """
    for part in parts:
        if PARTS[part](config):
            raise inexpressible(part, dialect)


UNKNOWN = "it may change what the drafter computes; ask who trained it, and remove it only if it does not"
SAME_NAMES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "attention_bias"),
}
"""Fields of DrafterConfig with the same name in Qwen3Config."""
WRITTEN_ANYWAY = {
    *("_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "id2label"),
    *("chunk_size_feed_forward", "dtype", "torch_dtype", "label2id", "is_encoder_decoder", "model_type"),
    *("output_attentions", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings"),
    *("transformers_version", "use_cache", "initializer_range", "attention_dropout", "num_labels", "name_or_path"),
    *("is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"),
    *("finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "sep_token_id", "torchscript"),
    *("decoder_start_token_id", "tf_legacy_loss", "use_bfloat16", "use_return_dict", "attn_implementation"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("diversity_penalty", "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "has_no_defaults_at_init"),
}
"""Keys that transformers 4 and 5 write for every model, without effect on what is computed here."""
TRANSFORMER_KEYS = {
    *(*SAME_NAMES, *WRITTEN_ANYWAY, "hidden_act", "mlp_bias", "use_gemma_norm", "num_hidden_layers"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("quantization_config", "compression_config", "pretraining_tp", "use_mrope"),
}
"""Keys of a stack of layers that are read, refused where they change it, or without effect."""
HALVES = ("rope_is_neox_style", "is_neox_style")
"""Two names of one switch: RoPE pairs the halves of a head; false pairs its neighbours."""
TARGET_KEYS = {
    *("attn_output_gate", "output_gate_type", "full_attention_interval", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
    *("decoder_sparse_step", "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok"),
    *("output_router_logits", "router_aux_loss_coef", "shared_expert_intermediate_size"),
}
"""Keys of Qwen targets that trainers copy into a drafter's file.

Gates, experts and linear attention have weights of their own or wider ones: a drafter that has them is refused by its
tensors.
"""
DRAFTER_KEYS = {*TRANSFORMER_KEYS, *TARGET_KEYS, *HALVES, "flex_attention_backend"}
"""Those of a drafter's layers; `flex_attention_backend` is how speculators trained it."""
QWEN3_HEAD_DIM = 128
"""Default of transformers' Qwen3Config, which every engine takes for a qwen3 config.json without head_dim."""

ROPE_FIELDS = RopeConfig.model_fields.keys() - {"theta", "scaling"}
ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
ROPE_HARMLESS = {
    *("rope_theta", "rope_type", "type"),
    *("partial_rotary_factor", "rope_dim", "mrope_section", "mrope_interleaved", "finetuned"),
}
"""Keys without effect on a text drafter, or checked apart: three equal mrope axes are plain RoPE."""


def read_transformer(config: ConfigSection) -> dict[str, object]:
    """Fields of a DrafterConfig that Qwen3Config has too; options that DFlash's layers do not have become problems."""
    config.refuse("hidden_act", ("silu",), "DFlash drafters use silu")
    config.refuse("mlp_bias", (False,), "a bias in the MLP is not supported")
    config.refuse("use_gemma_norm", (False,), "Gemma's norms are not supported in a drafter yet")
    config.either(*HALVES, bool)  # `pairs_neighbours` reads it
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            config.note(f"the drafter is quantised ({config.named(key)}) in an unsupported form", BUILD)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    qwen = (config.given("model_type", str) or "qwen3") == "qwen3"
    head_dim = config.integer("head_dim", QWEN3_HEAD_DIM if qwen else max(1, hidden // heads))
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position_embeddings": config.optional_integer("max_position_embeddings"),
        "rms_norm_eps": config.positive("rms_norm_eps"),
        "attention_bias": config.given("attention_bias", bool),
        "rope": read_rope(config, head_dim=head_dim),
    }


def pairs_neighbours(raw: Mapping[str, object]) -> bool:
    """RoPE of a config.json's drafter pairs neighbours, not halves (LFM2.5's drafters)."""
    config = ConfigSection(raw, "", [])
    return config.section("transformer_layer_config", falls_back=True).either(*HALVES, bool) is False


def read_depth(config: ConfigSection) -> int:
    """`num_hidden_layers`; more than `MOST_LAYERS` is a problem, and counts as 1."""
    count = config.integer("num_hidden_layers")
    if count <= MOST_LAYERS:
        return count
    config.note(f"num_hidden_layers is {count}, more than any drafter has", "correct it")
    return 1


def read_windows(config: ConfigSection, window: int | None = None) -> tuple[int | None, ...]:
    """The window of every layer by transformers' rules; None = full attention.

    `layer_types` lists the sliding layers; without it, `use_sliding_window` makes all layers from `max_window_layers`
    on slide. `window` is the size if `sliding_window` is absent.
    """
    sliding = _sliding_layers(config, read_depth(config))
    if not any(sliding):
        return (None,) * len(sliding)
    if config.given("use_sliding_window", bool) is False:
        config.note(
            f"layer_types has {SLIDING} layers but use_sliding_window is false",
            "set use_sliding_window to true, or the layers to full_attention",
        )
    window = config.integer("sliding_window", window)
    return tuple(window if slides else None for slides in sliding)


def _sliding_layers(config: ConfigSection, count: int) -> tuple[bool, ...]:
    types = config.given("layer_types", list[str])
    if types is None:
        first = (
            config.integer("max_window_layers", count, minimum=0) if config.given("use_sliding_window", bool) else count
        )
        return tuple(layer >= first for layer in range(count))
    if len(types) != count:
        config.note(f"layer_types names {len(types)} layers but num_hidden_layers is {count}", "correct one of them")
    for unknown in sorted(set(types) - {FULL, SLIDING}):
        config.note(f"layer type {unknown!r} is not supported", f"supported are: {FULL}, {SLIDING}")
    return tuple(kind == SLIDING for kind in types)


def write_transformer(config: DrafterConfig, rope: dict[str, object]) -> dict[str, object]:
    """The Qwen3Config keys of a drafter, with `rope` in either form."""
    windows = {kind.window for kind in config.layers} - {None}
    return {
        "model_type": "qwen3",
        **config.model_dump(include=SAME_NAMES),
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": [FULL if kind.window is None else SLIDING for kind in config.layers],
        "max_window_layers": config.num_layers,
        "num_hidden_layers": config.num_layers,
        **rope,
        "sliding_window": max(window for window in windows if window) if windows else None,
        "use_sliding_window": bool(windows),
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def make_kinds(windows: tuple[int | None, ...], causal: bool | None) -> tuple[AttentionKind, ...]:
    """Layer kinds from windows. `causal` None = the rule of August 2026: a sliding layer is causal in the block."""
    return tuple(
        AttentionKind(window=window, causal=window is not None if causal is None else causal) for window in windows
    )


def read_rope(config: ConfigSection, default_theta: float | None = None, *, head_dim: int | None = None) -> RopeConfig:
    """RoPE in the older form, or in transformers 5's `rope_parameters`, flat or by layer type.

    A missing theta without a default is a problem: engines' defaults differ by a factor of 100. Entries of layer types
    that no layer has are not used.

    Args:
        head_dim: of a drafter. Trainers copy the target's `partial_rotary_factor` and rotate whole heads all the same,
            as transformers' Qwen3 does unless RoPE is scaled; SGLang's `rope_dim` tells it. None = a target.
    """
    new = config.section("rope_parameters")
    if not any(isinstance(value, dict) for value in new.raw.values()):
        return _flat_rope(config, default_theta, head_dim)
    kinds = sorted(set(config.given("layer_types", list[str]) or new.raw))
    for kind in (kind for kind in kinds if not isinstance(new.raw.get(kind), dict)):
        config.note(f"{new.named(kind)} is {new.raw.get(kind)!r}, no RoPE of this layer type", "add it")
    flat = {**config.raw, "rope_scaling": None}
    ropes = {
        kind: _flat_rope(
            ConfigSection({**flat, "rope_parameters": new.raw[kind]}, config.where, config.problems),
            default_theta,
            head_dim,
        )
        for kind in kinds
        if isinstance(new.raw.get(kind), dict)
    }
    if len(set(ropes.values())) > 1:
        config.note(
            f"{new.path} differs by layer type ({', '.join(ropes)})", "layers that differ in RoPE are not supported"
        )
    return next(iter(ropes.values()), RopeConfig())


def _flat_rope(config: ConfigSection, default_theta: float | None, head_dim: int | None) -> RopeConfig:
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new.raw and old.raw and _rope_kind(new) != _rope_kind(old):
        what = f"{new.path} says {_rope_kind(new)!r} but {old.path} says {_rope_kind(old)!r}"
        config.note(what, "keep the right one")
    section = config.section("rope_parameters" if new.raw else "rope_scaling", falls_back=True)
    kind = _rope_kind(section)
    section.refuse("rope_dim", (head_dim,), "partial rotary embedding is not supported")
    if head_dim is None or (kind != "default" and not section.has("rope_dim")):
        section.refuse("partial_rotary_factor", (1,), "partial rotary embedding is not supported")
    theta = section.positive("rope_theta") if section.has("rope_theta") else default_theta
    if theta is None:
        if not section.has("rope_theta"):
            config.note(f"no {config.named('rope_theta')}", "add the target's rope_theta")
        theta = 1.0
    if kind == "default":
        if section.path:
            section.only(ROPE_FIELDS | ROPE_HARMLESS, UNKNOWN)
        return RopeConfig(theta=theta)
    if kind not in ROPE_NEEDS:
        section.note(f"rope type {kind!r} is not supported", f"supported are: default, {', '.join(ROPE_NEEDS)}")
        return RopeConfig(theta=theta)
    return _scaled_rope(theta, kind, section)


def _rope_kind(section: ConfigSection) -> str:
    return section.given("rope_type", str) or section.given("type", str) or "default"


def _scaled_rope(theta: float, kind: str, section: ConfigSection) -> RopeConfig:
    section.only(ROPE_FIELDS | ROPE_HARMLESS, "remove it")
    kinds: dict[str, type[object]] = {"short_factor": list[float], "long_factor": list[float], "truncate": bool}
    original = "original_max_position_embeddings"
    values = {key: section.given(key, kinds.get(key, float)) for key in ROPE_FIELDS - {original}}
    values[original] = section.optional_integer(original)
    for key in ROPE_NEEDS[kind]:
        if values[key] is None:
            section.note(f"rope type {kind!r} without {section.named(key)}", "add it")
    return RopeConfig.model_validate({"theta": theta, "scaling": kind, **values})


def rope_theta_and_scaling(rope: RopeConfig) -> dict[str, object]:
    """RoPE keys in the older form, which transformers 5 and every engine also read."""
    scaling = rope.parameters
    theta = scaling.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": scaling if rope.scaling else None}


def read_block_size(config: ConfigSection, slots: Slots) -> int:
    """B from `block_size`, which counts a block's rows: B of fill-in slots, B - 1 of anchor-first ones."""
    if not config.has("block_size"):
        trained = "the slots that it was trained with, the anchor counted: 8 in most"
        config.note(f"no {config.named('block_size')}", f"set speculation.block_size (--block-size) to {trained}")
        return 2
    if slots == "fill-in":
        return config.integer("block_size", minimum=2)
    return config.integer("block_size") + 1


PADDED = "if it is a padded size, set it to vocab_size and cut the rows of lm_head; else correct one of them"


def read_draft_vocabulary(config: ConfigSection, vocab_size: int) -> int | None:
    """`draft_vocab_size`, which speculators always writes; None = all of the target's tokens."""
    draft = config.optional_integer("draft_vocab_size")
    if draft is not None and draft > vocab_size:
        config.note(f"draft_vocab_size {draft} is more than vocab_size {vocab_size}", PADDED)
    return None if draft is None or draft >= vocab_size else draft


def check_architecture(config: ConfigSection, architectures: Collection[str]) -> None:
    """Adds a problem for any other architecture."""
    for name in config.architectures:
        if name not in architectures:
            config.note(f"architecture {name!r} is not supported", f"supported are: {', '.join(architectures)}")

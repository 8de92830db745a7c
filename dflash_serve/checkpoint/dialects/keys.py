"""Keys of config.json that several dialects share: heads and slot convention, and the transformer (Qwen3Config).

Nothing is guessed. Some missing keys mean opposite things to two readers; then the checkpoint's other keys or its
tensors decide, or the drafter is refused: an engine would silently load the wrong reading and accept nothing.
RoPE is read and written as transformers 5's `rope_parameters`, or as the older `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, cast, get_args

from dflash_serve.checkpoint.config import (
    BUILD,
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
from dflash_serve.checkpoint.dialects import ConfigSection, inexpressible

MARKOV_KEYS = {
    *("markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head"),
    *("confidence_head_with_markov", "confidence_head_alpha"),
}
DFLASH2_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
SLOT_KEYS = {"sample_from_anchor", "shift_label"}
HEAD_KEYS = MARKOV_KEYS | DFLASH2_KEYS | SLOT_KEYS
CONFIDENCE = "confidence_head."  # prefix of the confidence head's tensor names


def read_heads(config: ConfigSection, stored: Collection[str], *, markov_kind: str | None = None) -> dict[str, object]:
    """`markov`, `confidence`, `convolution` and `selector` of a DrafterConfig.

    Args:
        config: the section with the keys.
        stored: names of the checkpoint's tensors; empty if only its configuration is there.
        markov_kind: meaning of a missing markov_head_type in this dialect; None = the key is required.
    """
    markov = _markov(config, markov_kind)
    return {
        "markov": markov,
        "confidence": _confidence(config, stored, markov),
        "convolution": _convolution(config),
        "selector": _selector(config),
    }


def read_slots(config: ConfigSection, default: Slots) -> Slots:
    """The slot convention; `default` is the one of this dialect's own code without a key."""
    sampled, shifted = config.flag("sample_from_anchor"), config.flag("shift_label")
    if sampled is not None and shifted is not None and sampled != shifted:
        names = config.named("sample_from_anchor"), config.named("shift_label")
        config.note(f"{names[0]} is {sampled} but {names[1]} is {shifted}", "keep the right one")
    told = shifted if sampled is None else sampled
    return default if told is None else "anchor-first" if told else "fill-in"


def _markov(config: ConfigSection, default: str | None) -> MarkovConfig | None:
    rank = config.optional_integer("markov_rank", minimum=0)
    if not rank:
        return None
    kind = config.text("markov_head_type") or default
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
    enabled, used = config.flag("enable_confidence_head"), config.flag("use_confidence_head")
    if enabled is not None and used is not None and enabled != used:
        config.note(f"enable_confidence_head is {enabled} but use_confidence_head is {used}", "keep the right one")
    told = used if enabled is None else enabled
    present = any(name.startswith(CONFIDENCE) for name in stored) if told is None else told
    if not present:
        return None
    with_markov = config.flag("confidence_head_with_markov")
    if with_markov is None:
        if markov is not None and used is None:  # ModelOpt, which writes use_, has one with Markov embeddings only
            do = "add whether it reads Markov embeddings: true or false"
            config.note("a confidence head without confidence_head_with_markov", do)
        with_markov = markov is not None
    return ConfidenceConfig(with_markov=with_markov)


def _convolution(config: ConfigSection) -> ConvolutionConfig | None:
    sizes = _together(config, "conv_kernel_size", "conv_group_size")
    return None if sizes is None else ConvolutionConfig(taps=sizes[0], group_size=sizes[1])


def _selector(config: ConfigSection) -> SelectorConfig | None:
    sizes = _together(config, "selector_rank", "selector_top_k")
    return None if sizes is None else SelectorConfig(rank=sizes[0], top_k=sizes[1])


def _together(config: ConfigSection, *keys: str) -> tuple[int, int] | None:
    # Both sizes are given or none; engines write 0 for none.
    first, second = (config.optional_integer(key, minimum=0) or 0 for key in keys)
    if bool(first) != bool(second):
        here, missing = keys if first else keys[::-1]
        config.note(f"{config.named(here)} without {missing}", f"add {missing}, or remove {here}")
        return None
    return (first, second) if first else None


def slot_keys(config: DrafterConfig) -> dict[str, object]:
    """Keys of the slot convention, which is always written."""
    return {"sample_from_anchor": config.slots == "anchor-first"}


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


def refuse_to_write(config: DrafterConfig, dialect: str, *, heads: Collection[str]) -> None:
    """Refuses a drafter with parts that a dialect cannot describe.

    Args:
        heads: parts that it can: `slots`, `draft_vocabulary`, `markov`, `confidence`, `convolution`, `selector`.

    Raises:
        UserError: the drafter has another part.
    """
    present = {
        "slots": (config.slots != "fill-in", "anchor-first slots"),
        "draft_vocabulary": (config.draft_vocabulary is not None, "a reduced draft vocabulary"),
        "markov": (config.markov is not None, "a Markov head"),
        "confidence": (config.confidence is not None, "a confidence head"),
        "convolution": (config.convolution is not None, "convolutions"),
        "selector": (config.selector is not None, "a candidate selector"),
    }
    for head, (there, what) in present.items():
        if there and head not in heads:
            raise inexpressible(what, dialect)


UNKNOWN = "it may change what the drafter computes; remove it if it does not"
FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 1024
SAME_NAMES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "attention_bias"),
}
"""Fields of DrafterConfig with the same name in Qwen3Config."""
QWEN3_HEAD_DIM = 128
"""Default of transformers' Qwen3Config, which every engine takes for a qwen3 config.json without head_dim."""

Scaling = Literal["linear", "llama3", "yarn", "longrope"]

ROPE_NUMBERS = (
    *("factor", "attention_factor", "mscale", "mscale_all_dim"),
    *("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
)
ROPE_LISTS = ("short_factor", "long_factor")
ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
ROPE_HARMLESS = {
    *("rope_theta", "rope_type", "type"),
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved", "finetuned"),
}
"""Keys without effect on a text drafter: three equal mrope axes are plain RoPE."""


def read_transformer(config: ConfigSection) -> dict[str, object]:
    """Fields of a DrafterConfig that Qwen3Config has too; options that DFlash's layers do not have become problems."""
    config.refuse("hidden_act", ("silu",), "DFlash drafters use silu")
    config.refuse("mlp_bias", (False,), "a bias in the MLP is not supported")
    config.refuse("use_gemma_norm", (False,), "Gemma's norms are not supported in a drafter yet")
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            config.note(f"the drafter is quantised ({config.named(key)}) in an unsupported form", BUILD)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    qwen = (config.text("model_type") or "qwen3") == "qwen3"
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", QWEN3_HEAD_DIM if qwen else max(1, hidden // heads)),
        "max_position_embeddings": config.integer("max_position_embeddings", 32768),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "attention_bias": config.flag("attention_bias") or False,
        "rope": _read_rope(config),
    }


def read_windows(config: ConfigSection, window: int | None = None) -> tuple[int | None, ...]:
    """The window of every layer by transformers' rules; None = full attention.

    `layer_types` lists the sliding layers; without it, `use_sliding_window` makes all layers from `max_window_layers`
    on slide. `window` is the size if `sliding_window` is absent.
    """
    count = config.integer("num_hidden_layers")
    sliding = _sliding_layers(config, count)
    if not any(sliding):
        return (None,) * len(sliding)
    if config.flag("use_sliding_window") is False:
        config.note(
            f"layer_types has {SLIDING} layers but use_sliding_window is false",
            "set use_sliding_window to true, or the layers to full_attention",
        )
    window = config.integer("sliding_window", window)
    return tuple(window if slides else None for slides in sliding)


def _sliding_layers(config: ConfigSection, count: int) -> tuple[bool, ...]:
    if count > MOST_LAYERS:
        config.note(f"num_hidden_layers is {count}, more than any drafter has", "correct it")
        return ()
    types = config.strings("layer_types")
    if types is None:
        first = config.integer("max_window_layers", count, minimum=0) if config.flag("use_sliding_window") else count
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


def _read_rope(config: ConfigSection) -> RopeConfig:
    # A missing theta is a problem: engines' defaults differ by a factor of 100.
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new.raw and old.raw and _rope_kind(new) != _rope_kind(old):
        what = f"{new.path} says {_rope_kind(new)!r} but {old.path} says {_rope_kind(old)!r}"
        config.note(what, "keep the right one")
    section = config.section("rope_parameters" if new.raw else "rope_scaling", falls_back=True)
    section.refuse("partial_rotary_factor", (1,), "partial rotary embedding is not supported")
    theta = section.optional_number("rope_theta")
    if theta is None or theta <= 0:
        config.note(
            f"no {config.named('rope_theta')}" if theta is None else f"rope_theta is {theta}, not positive",
            "add the target's rope_theta",
        )
        theta = 1.0
    kind = _rope_kind(section)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in get_args(Scaling):
        section.note(f"rope type {kind!r} is not supported", f"supported are: default, {', '.join(ROPE_NEEDS)}")
        return RopeConfig(theta=theta)
    return _scaled_rope(theta, kind, section)


def _rope_kind(section: ConfigSection) -> str:
    return section.text("rope_type") or section.text("type") or "default"


def _scaled_rope(theta: float, kind: str, section: ConfigSection) -> RopeConfig:
    section.only(
        {*ROPE_NUMBERS, *ROPE_LISTS, *ROPE_HARMLESS, "original_max_position_embeddings", "truncate"}, "remove it"
    )
    values: dict[str, object] = {
        **{key: section.optional_number(key) for key in ROPE_NUMBERS},
        **{key: section.numbers(key) for key in ROPE_LISTS},
        "original_max_position_embeddings": section.optional_integer("original_max_position_embeddings"),
        "truncate": section.flag("truncate"),
    }
    for key in ROPE_NEEDS[kind]:
        if values[key] is None:
            section.note(f"rope type {kind!r} without {section.named(key)}", "add it")
    return RopeConfig.model_validate({"theta": theta, "scaling": kind, **values})


def rope_parameters(rope: RopeConfig) -> dict[str, object]:
    """RoPE keys in the form of transformers 5."""
    known = rope.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
    return {"rope_type": rope.scaling or "default", "rope_theta": rope.theta, **known}


def rope_theta_and_scaling(rope: RopeConfig) -> Mapping[str, object]:
    """RoPE keys in the older form, which transformers 5 and every engine also read."""
    known = rope.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
    scaling = None if rope.scaling is None else {"rope_type": rope.scaling, **known}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def read_block_size(config: ConfigSection, slots: Slots) -> int:
    """B from `block_size`, which counts a block's rows: B of fill-in slots, B - 1 of anchor-first ones."""
    if slots == "fill-in":
        return config.integer("block_size", minimum=2)
    return config.integer("block_size") + 1


def check_architecture(config: ConfigSection, architectures: Collection[str]) -> None:
    """Adds a problem for any other architecture."""
    for name in config.strings("architectures") or ():
        if name not in architectures:
            config.note(f"architecture {name!r} is not supported", f"supported are: {', '.join(architectures)}")

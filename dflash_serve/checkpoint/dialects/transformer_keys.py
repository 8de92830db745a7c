"""The transformer half of a drafter's config.json: transformers' Qwen3Config keys, in whichever section.

RoPE is written as transformers 5's `rope_parameters`, or as `rope_theta` and `rope_scaling` before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, RopeConfig
from dflash_serve.checkpoint.dialects.dialect import ConfigSection
from dflash_serve.checkpoint.quantization import BUILD

FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 1024
SAME_NAMES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "attention_bias"),
}
"""Fields of DrafterConfig that are called the same in Qwen3Config."""
QWEN3_HEAD_DIM = 128
"""transformers' Qwen3Config default, which every engine takes where a qwen3 config.json has no head_dim."""

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
"""Keys that say nothing more about a text drafter: three equal mrope axes are plain RoPE."""


def read_transformer(config: ConfigSection) -> dict[str, object]:
    """The fields of DrafterConfig that transformers names too; notes what a DFlash drafter's layers cannot be."""
    config.refuse("hidden_act", ("silu",), "DFlash drafters use silu")
    config.refuse("mlp_bias", (False,), "a bias in the MLP is not supported")
    config.refuse("use_gemma_norm", (False,), "Gemma's norms are not supported in a drafter yet")
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            config.note(f"the drafter is quantised ({config.named(key)}), in a form that is not read", BUILD)
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
    """The window of every layer, None = full attention, by transformers' rules.

    `layer_types` says which layers slide; without it, `use_sliding_window` makes all from `max_window_layers` on slide.
    `window` is the size where it is not `sliding_window` that gives it.
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
    """Layer kinds from windows; `causal` None is the rule of August 2026: a sliding layer is causal in the block."""
    return tuple(
        AttentionKind(window=window, causal=window is not None if causal is None else causal) for window in windows
    )


def _read_rope(config: ConfigSection) -> RopeConfig:
    """The rotary embedding of a transformer's section. No theta is a problem: engines' defaults differ 100-fold."""
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new.raw and old.raw and _rope_kind(new) != _rope_kind(old):
        config.note(
            f"{new.path} says {_rope_kind(new)!r} but {old.path} says {_rope_kind(old)!r}", "keep the right one"
        )
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
    """The transformers 5 form."""
    known = rope.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
    return {"rope_type": rope.scaling or "default", "rope_theta": rope.theta, **known}


def rope_theta_and_scaling(rope: RopeConfig) -> Mapping[str, object]:
    """The older form, which transformers 5 and every engine read as well."""
    known = rope.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
    scaling = None if rope.scaling is None else {"rope_type": rope.scaling, **known}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}

"""The transformer half of a drafter's config.json: transformers' Qwen3Config keys, in whichever section."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, RopeConfig
from dflash_serve.checkpoint.dialects.rope_keys import read_rope
from dflash_serve.checkpoint.dialects.section import Section
from dflash_serve.checkpoint.quantization import BUILD

FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 1024
QWEN3_HEAD_DIM = 128
"""transformers' Qwen3Config default, which every engine takes where a qwen3 config.json has no head_dim."""


@dataclass(frozen=True)
class Transformer:
    """The sizes of DrafterConfig that transformers names; field names are DrafterConfig's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    rope: RopeConfig

    def fields(self) -> dict[str, object]:
        """For DrafterConfig(**fields)."""
        return {**asdict(self), "rope": self.rope}


def read_transformer(config: Section) -> Transformer:
    """Reads the sizes, and notes what a DFlash drafter's layers cannot be."""
    config.refuse("hidden_act", ("silu",), "DFlash drafters use silu")
    config.refuse("mlp_bias", (False,), "a bias in the MLP is not supported")
    config.refuse("use_gemma_norm", (False,), "Gemma's norms are not supported in a drafter yet")
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            config.note(f"the drafter is quantised ({config.named(key)}), in a form that is not read", BUILD)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    qwen = (config.text("model_type") or "qwen3") == "qwen3"
    return Transformer(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", QWEN3_HEAD_DIM if qwen else max(1, hidden // heads)),
        max_position_embeddings=config.integer("max_position_embeddings", 32768),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        attention_bias=config.flag("attention_bias") or False,
        rope=read_rope(config),
    )


def read_windows(config: Section, window: int | None = None) -> tuple[int | None, ...]:
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


def _sliding_layers(config: Section, count: int) -> tuple[bool, ...]:
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
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": [FULL if kind.window is None else SLIDING for kind in config.layers],
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        **rope,
        "sliding_window": max(window for window in windows if window) if windows else None,
        "use_sliding_window": bool(windows),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def kinds(windows: tuple[int | None, ...], causal: bool | None) -> tuple[AttentionKind, ...]:
    """Layer kinds from windows; `causal` None is the rule of August 2026: a sliding layer is causal in the block."""
    return tuple(
        AttentionKind(window=window, causal=window is not None if causal is None else causal) for window in windows
    )

"""z-lab's own dialect: Hugging Face checkpoints `z-lab/*-DFlash` and `*-DFlash2`, SpecForge's plain ones, and what
SGLang, TensorRT-LLM and vLLM read.

April 2026: `block_size` at top level, `dflash_config` {mask_token_id, target_layer_ids}. August 2026 (dflash 0.1.0):
every key is looked up in `dflash_config` first and at top level second, and `is_causal`, `input_embedding_scale`,
`output_multiplier` and `final_logit_softcapping` appear. SpecForge writes no `target_layer_ids`, which means z-lab's
uniform formula. DFlash2's sizes are written into `dflash_config`, the only place where SGLang reads them. Slots are
fill-in.

Windows follow August's rule: a `sliding_attention` layer is causal inside the block unless `is_causal` says otherwise.
(April's SDPA path ignored windows altogether; the same weights then draft differently beyond the window.)
"""

from __future__ import annotations

from collections.abc import Collection

from dflash_serve.checkpoint.config import MASK_EMBEDDING, AttentionKind, DrafterConfig, Slots, uniform_target_layer_ids
from dflash_serve.checkpoint.dialects import (
    ConfigSection,
    Dialect,
    inexpressible,
    keys,
    one_value,
    refuse_other_attention,
)
from dflash_serve.checkpoint.dialects.keys import (
    make_kinds,
    read_transformer,
    read_windows,
    rope_theta_and_scaling,
    write_transformer,
)

NAME = "zlab"
KEYS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    *keys.HEAD_KEYS,
}
REFUSABLE = {"projector_type", "attention_mode", "attention_sink_bias", "attention_value_scale"}
HARMLESS = {"mask_token", "pure_draft_prefix_len", "dtype"}
"""Keys without effect on drafting; `mask_token` is the text of mask_token_id."""
UNKNOWN = "it may change what the drafter computes; remove it if it does not"
PLAIN_ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator", "Qwen3DFlashModel", "MuseGlimmerAssistantModel")
DFLASH2_ARCHITECTURE = "DFlash2DraftModel"
DFLASH2_ARCHITECTURES = (DFLASH2_ARCHITECTURE, "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")


def matches(config: ConfigSection) -> bool:
    """config.json is in z-lab's dialect."""
    named = any("dflash" in name.lower() for name in config.strings("architectures") or ())
    return named or config.has("dflash_config") or config.has("target_layer_ids")


def read(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from a z-lab config.json (dflash 0.1.0 `model.py`, SGLang 0.5.23 `dflash_utils.py`)."""
    dflash = config.section("dflash_config", falls_back=True)
    dflash.only(KEYS | REFUSABLE | HARMLESS, UNKNOWN)
    layers = make_kinds(read_windows(config), dflash.flag("is_causal"))
    return read_fields(config, dflash, layers, stored)


def read_fields(
    config: ConfigSection,
    dflash: ConfigSection,
    layers: tuple[AttentionKind, ...],
    stored: Collection[str],
    *,
    slots: Slots = "fill-in",
    architectures: Collection[str] = (*PLAIN_ARCHITECTURES, *DFLASH2_ARCHITECTURES),
) -> dict[str, object]:
    """Fields of a DrafterConfig, with windows from the caller: ModelOpt writes them elsewhere.

    Args:
        stored: names of the checkpoint's tensors.
        slots: the convention if no key gives it.
        architectures: the ones of the dialect.
    """
    check_architecture(config, architectures)
    refuse_other_attention(dflash)
    _refuse_own_ends(config)
    depth = dflash.optional_integer("num_target_layers")
    softcap = dflash.optional_number("final_logit_softcapping")
    has_mask_embedding = MASK_EMBEDDING in stored
    told = keys.read_slots(dflash, slots)
    _check_dflash2(config, dflash)
    return {
        **read_transformer(config),
        **keys.read_heads(dflash, stored),
        "block_size": read_block_size(dflash, told),
        "slots": told,
        "target_layer_ids": _target_layer_ids(dflash, depth, len(layers)),
        "num_target_layers": depth,
        "mask_token_id": _mask_token_id(dflash, has_mask_embedding),
        "has_mask_embedding": has_mask_embedding,
        "layers": layers,
        "embedding_scale": dflash.number("input_embedding_scale", 1.0),
        "output_multiplier": dflash.number("output_multiplier", 1.0),
        "final_logit_softcap": softcap if softcap and softcap > 0 else None,
    }


def _refuse_own_ends(config: ConfigSection) -> None:
    config.refuse("has_embed_tokens", (False,), "a drafter with an embedding of its own is not supported yet")
    config.refuse("has_lm_head", (False,), "a drafter with a whole head of its own is not supported yet")


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


def _check_dflash2(config: ConfigSection, dflash: ConfigSection) -> None:
    # Engines choose their model by the architecture and build it by the sizes, so both must agree.
    named = any(name in DFLASH2_ARCHITECTURES for name in config.strings("architectures") or ())
    pairs = [("conv_group_size", "conv_kernel_size"), ("selector_rank", "selector_top_k")]
    missing = [key for pair in pairs if not any(map(dflash.has, pair)) for key in pair]
    if named and missing:
        config.note(f"a DFlash2 drafter without {', '.join(missing)}", "add what it was trained with")


def _mask_token_id(dflash: ConfigSection, has_mask_embedding: bool) -> int | None:
    token = dflash.optional_integer("mask_token_id", minimum=0)
    if token is None and not has_mask_embedding:
        dflash.note(
            f"no {dflash.named('mask_token_id')}: masked slots would have no input",
            "add the id of the token it was trained with",
        )
    return token


def _target_layer_ids(dflash: ConfigSection, depth: int | None, count: int) -> tuple[int, ...]:
    given = dflash.integers("target_layer_ids")
    if given is not None or dflash.has("target_layer_ids"):
        return given or (0,)
    if depth is None:
        dflash.note(
            "neither target_layer_ids nor num_target_layers is given", "add the target layers it was trained with"
        )
        return (0,)
    try:
        return uniform_target_layer_ids(depth, count)
    except ValueError as error:
        dflash.note(str(error), "add the target layers it was trained with")
        return (0,)


def write(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as SGLang 0.5.23, TensorRT-LLM 1.3 (block_size at top level), vLLM and z-lab's code read it."""
    keys.refuse_to_write(config, NAME, heads=("convolution", "selector"))
    fields = write_fields(config, NAME)
    fields["dflash_config"] = {**section_of(fields), **keys.dflash2_keys(config)}
    fields |= keys.slot_keys(config)
    if config.selector is not None:
        fields["architectures"] = [DFLASH2_ARCHITECTURE]
    causal = common_causality(config, NAME)
    return fields if causal is None else {**fields, "is_causal": causal}


def section_of(fields: dict[str, object]) -> dict[str, object]:
    """The `dflash_config` in the result of `write_fields`."""
    section = fields["dflash_config"]
    assert isinstance(section, dict)
    return section


def write_fields(config: DrafterConfig, dialect: str) -> dict[str, object]:
    """Keys of a drafter without its heads, slot convention and causality."""
    one_value({kind.window for kind in config.layers} - {None}, "windows", dialect)
    dflash: dict[str, object] = {"target_layer_ids": list(config.target_layer_ids)}
    if config.mask_token_id is not None:
        dflash["mask_token_id"] = config.mask_token_id
    scales = {
        "input_embedding_scale": (config.embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcap, None),
    }
    dflash.update({key: value for key, (value, default) in scales.items() if value != default})
    depth = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.rows(),
        "dflash_config": dflash,
        **depth,
        **write_transformer(config, dict(rope_theta_and_scaling(config.rope))),
    }


def common_causality(config: DrafterConfig, dialect: str) -> bool | None:
    """The value of `is_causal` for all layers; None if they differ by the rule that sliding layers are causal."""
    causal = {kind.causal for kind in config.layers}
    if len(causal) == 1:
        return causal.pop()
    if all(kind.causal == (kind.window is not None) for kind in config.layers):
        return None
    raise inexpressible("some layers causal and others not, other than sliding ones causal", dialect)


DIALECT = Dialect(NAME, matches, read, write)

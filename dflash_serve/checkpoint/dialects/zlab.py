"""z-lab's own dialect: Hugging Face checkpoints `z-lab/*-DFlash`, DeepSpec's and SpecForge's, and what SGLang,
TensorRT-LLM and vLLM read.

April 2026: `block_size` at top level, `dflash_config` {mask_token_id, target_layer_ids}. August 2026 (dflash 0.1.0):
everything is looked up in `dflash_config` first and at top level second, and `is_causal`, `input_embedding_scale`,
`output_multiplier` and `final_logit_softcapping` appear. DeepSpec puts `target_layer_ids` at top level; SpecForge gives
none, which means z-lab's uniform formula.

Windows follow August's rule: a `sliding_attention` layer is causal inside the block unless `is_causal` says otherwise.
(April's SDPA path ignored windows altogether; the same weights then draft differently beyond the window.)
"""

from __future__ import annotations

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, uniform_target_layer_ids
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
    rope_theta_and_scaling,
    write_transformer,
)

NAME = "zlab"
KEYS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
}
REFUSABLE = {"sample_from_anchor", "shift_label", "projector_type", "attention_sink_bias", "attention_value_scale"}
HARMLESS = {"mask_token", "pure_draft_prefix_len", "dtype"}
"""Read by nothing that drafts with plain DFlash; `mask_token` is the text of mask_token_id."""
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator", "Qwen3DFlashModel")


def matches(config: ConfigSection) -> bool:
    """Whether a config.json speaks this dialect."""
    named = any("dflash" in name.lower() for name in config.strings("architectures") or ())
    return named or config.has("dflash_config") or config.has("target_layer_ids")


def read(config: ConfigSection, has_mask_embedding: bool) -> dict[str, object]:
    """DrafterConfig's fields of a z-lab config.json (dflash 0.1.0 `model.py`, SGLang 0.5.23 `dflash_utils.py`)."""
    dflash = config.section("dflash_config", falls_back=True)
    dflash.only(KEYS | REFUSABLE | HARMLESS, "it may change what the drafter computes; remove it if it does not")
    return read_fields(config, dflash, make_kinds(read_windows(config), dflash.flag("is_causal")), has_mask_embedding)


def read_fields(
    config: ConfigSection, dflash: ConfigSection, layers: tuple[AttentionKind, ...], has_mask_embedding: bool
) -> dict[str, object]:
    """All but the windows, which ModelOpt writes elsewhere."""
    check_architecture(config)
    refuse_other_slots(dflash)
    config.refuse("has_embed_tokens", (False,), "a drafter with an embedding of its own is not supported yet")
    depth = dflash.optional_integer("num_target_layers")
    softcap = dflash.optional_number("final_logit_softcapping")
    return {
        **read_transformer(config),
        "block_size": dflash.integer("block_size", minimum=2),
        "target_layer_ids": _target_layer_ids(dflash, depth, len(layers)),
        "num_target_layers": depth,
        "mask_token_id": _mask_token_id(dflash, has_mask_embedding),
        "has_mask_embedding": has_mask_embedding,
        "layers": layers,
        "embedding_scale": dflash.number("input_embedding_scale", 1.0),
        "output_multiplier": dflash.number("output_multiplier", 1.0),
        "final_logit_softcap": softcap if softcap and softcap > 0 else None,
    }


def check_architecture(config: ConfigSection) -> None:
    """Notes an architecture that is no plain DFlash drafter."""
    for name in config.strings("architectures") or ():
        if name not in ARCHITECTURES:
            config.note(f"architecture {name!r} is not supported", f"supported are: {', '.join(ARCHITECTURES)}")


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
    fields = write_fields(config, NAME)
    causal = _common_causality(config)
    return fields if causal is None else {**fields, "is_causal": causal}


def write_fields(config: DrafterConfig, dialect: str) -> dict[str, object]:
    """All but the block's causality."""
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
        "block_size": config.block_size,
        "dflash_config": dflash,
        **depth,
        **write_transformer(config, dict(rope_theta_and_scaling(config.rope))),
    }


def _common_causality(config: DrafterConfig) -> bool | None:
    """What `is_causal` gives all layers; None where they differ, and the rule (sliding = causal) tells them apart."""
    causal = {kind.causal for kind in config.layers}
    if len(causal) == 1:
        return causal.pop()
    if all(kind.causal == (kind.window is not None) for kind in config.layers):
        return None
    raise inexpressible("some layers causal and others not, other than sliding ones causal", NAME)


DIALECT = Dialect(NAME, matches, read, write)

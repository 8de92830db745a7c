"""z-lab's dialect, and three that are its keys in other places with a few more: DeepSpec, SpecForge and ModelOpt.

z-lab's is the dialect of `z-lab/*-DFlash` and `*-DFlash2` and of SpecForge's plain drafters; SGLang, TensorRT-LLM and
vLLM read it.

April 2026: `block_size` at top level, `dflash_config` {mask_token_id, target_layer_ids}. August 2026 (dflash 0.1.0):
every key is looked up in `dflash_config` first and at top level second, and `is_causal`, `input_embedding_scale`,
`output_multiplier` and `final_logit_softcapping` appear. `target_layer_ids` must be there, though SGLang and z-lab's
code compute absent ones: the list is a choice of the training, and the formula is wrong for 14 of 20 published drafters
(z-lab/dflash#156). DFlash2's sizes are written into `dflash_config`, the only place where SGLang reads them. Slots are
fill-in.

Windows follow August's rule: a `sliding_attention` layer is causal inside the block unless `is_causal` says otherwise.
(April's SDPA path ignored windows altogether; the same weights then draft differently beyond the window.)

DeepSpec (deepseek-ai/DeepSpec) writes DSpark's keys at top level, SpecForge (sgl-project) in `dflash_config` or in
`dspark_config`. With
anchor-first slots `block_size` is the number of drafted tokens: our B - 1. DeepSpec's own code has no key for the slot
convention and is anchor-first; SGLang 0.5.23 reads `sample_from_anchor` at top level only. DeepSpec's plain drafters
(`dflash_qwen3_*_block7`) have the same architecture and `markov_rank: 0`.

ModelOpt 0.47 (`DFlashExporter`) writes windows and causality into `dflash_config`. `causal` is always written and holds
for every layer. `use_swa` + `swa_window_size` make every layer slide although `layer_types` stays at `full_attention`:
a reader that does not know these keys silently ignores the window. They are resolved as in vLLM (`qwen3_dflash.py`,
`_resolve_layer_attention`). A folder written here has z-lab's keys beside ModelOpt's, so that SGLang and TensorRT-LLM
read the same drafter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dflash_serve.checkpoint.config import (
    MASK_EMBEDDING,
    PLAIN_DRAFTER,
    SLIDING,
    AttentionKind,
    DrafterConfig,
    Slots,
    uniform_target_layer_ids,
)
from dflash_serve.checkpoint.dialects.keys import (
    DRAFTER_KEYS,
    HEAD_KEYS,
    SINKS,
    SLOT_KEYS,
    UNKNOWN,
    Dialect,
    check_architecture,
    dflash2_keys,
    inexpressible,
    make_kinds,
    markov_keys,
    one_value,
    read_block_size,
    read_depth,
    read_draft_vocabulary,
    read_heads,
    read_slots,
    read_transformer,
    read_windows,
    refuse_other_attention,
    refuse_own_embedding,
    refuse_parts,
    rope_theta_and_scaling,
    write_transformer,
)
from dflash_serve.checkpoint.section import ConfigSection

NAME = "zlab"
KEYS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    *HEAD_KEYS,
}
REFUSABLE = {"projector_type", "attention_mode", "attention_sink_bias", "attention_value_scale"}
HARMLESS = {"mask_token", "pure_draft_prefix_len", "dtype"}
"""Keys without effect on drafting; `mask_token` is the text of mask_token_id."""
TRAINING_KEYS = {"num_anchors", "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"}
"""Keys of the training, which serving does not need."""
TOP_LEVEL = {
    *(*DRAFTER_KEYS, *KEYS, *REFUSABLE, *HARMLESS, *TRAINING_KEYS, "dflash_config", "speculators_model_type"),
    *("has_embed_tokens", "has_lm_head", "add_swa_attention_sink_bias", "draft_vocab_size"),
}
DEEPSPEC_ARCHITECTURE, SPECFORGE_ARCHITECTURE = "Qwen3DSparkModel", "DSparkDraftModel"
DFLASH2_ARCHITECTURE = "DFlash2DraftModel"
DFLASH2_ARCHITECTURES = (
    DFLASH2_ARCHITECTURE,
    "DFlash2BeamDraftModel",
    "MiniMaxDFlash2DraftModel",
    "Qwen3DFlash2DraftModel",
)
ARCHITECTURES = (
    *("DFlashDraftModel", "DFlashSpeculator", "Qwen3DFlashModel", "Qwen3DFlashDraftModel"),
    *("MuseGlimmerAssistantModel", "Lfm2DSparkDraftModel", "LingDSparkModel"),
    *(*DFLASH2_ARCHITECTURES, DEEPSPEC_ARCHITECTURE, SPECFORGE_ARCHITECTURE),
)
"""Architectures with Qwen3's layers; NVIDIA-NeMo/Automodel writes `Qwen3DFlashDraftModel` and `Qwen3DFlash2DraftModel`.
DeepSpec has others."""
UNWRITTEN: Mapping[str, Mapping[str, object]] = {
    "muse_glimmer_assistant": {"vocab_size": 202048, "is_causal": False},  # transformers 5.16: bidirectional, no head
}
"""model_type -> what its class fixes and its files leave out."""


def matches(config: ConfigSection) -> bool:
    """config.json is in z-lab's dialect."""
    named = any("dflash" in name.lower() for name in config.architectures)
    return named or config.has("dflash_config") or config.has("target_layer_ids")


def read(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from a z-lab config.json (dflash 0.1.0 `model.py`, SGLang 0.5.23 `dflash_utils.py`)."""
    config = replace(config, raw={**UNWRITTEN.get(str(config.raw.get("model_type")), {}), **config.raw})
    dflash = config.section("dflash_config", falls_back=True)
    dflash.only(KEYS | REFUSABLE | HARMLESS, UNKNOWN)
    layers = make_kinds(read_windows(config), dflash.given("is_causal", bool))
    return read_fields(config, dflash, layers, stored)


def read_fields(
    config: ConfigSection,
    dflash: ConfigSection,
    layers: tuple[AttentionKind, ...],
    stored: Collection[str],
    *,
    slots: Slots = "fill-in",
    known: Collection[str] = (),
) -> dict[str, object]:
    """Fields of a DrafterConfig, with windows from the caller: ModelOpt writes them elsewhere.

    Args:
        stored: names of the checkpoint's tensors.
        slots: the convention if no key gives it.
        known: further keys at top level.
    """
    check_architecture(config, ARCHITECTURES)
    config.only(TOP_LEVEL | set(known), UNKNOWN)
    refuse_other_attention(dflash)
    refuse_own_embedding(config)
    config.refuse("has_lm_head", (False,), "a drafter with a whole head of its own is not supported yet")
    depth = dflash.optional_integer("num_target_layers")
    softcap = dflash.given("final_logit_softcapping", float)
    has_mask_embedding = MASK_EMBEDDING in stored
    told = read_slots(dflash, slots)
    _check_dflash2(config, dflash)
    return {
        **read_transformer(config),
        **read_heads(dflash, stored),
        "block_size": read_block_size(dflash, told),
        "slots": told,
        "draft_vocabulary": read_draft_vocabulary(config, config.integer("vocab_size")),
        "target_layer_ids": _target_layer_ids(dflash, depth, len(layers)),
        "num_target_layers": depth,
        "mask_token_id": _mask_token_id(dflash, has_mask_embedding),
        "has_mask_embedding": has_mask_embedding,
        "layers": layers,
        "embedding_scale": dflash.given("input_embedding_scale", float),
        "output_multiplier": dflash.given("output_multiplier", float),
        "final_logit_softcap": softcap if softcap and softcap > 0 else None,
    }


def _check_dflash2(config: ConfigSection, dflash: ConfigSection) -> None:
    # Engines choose their model by the architecture and build it by the sizes, so both must agree.
    named = any(name in DFLASH2_ARCHITECTURES for name in config.architectures)
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
    if given is None and not dflash.has("target_layer_ids"):
        do = "add the target layers it was trained with, each by its 0-based id"
        if depth is not None and 1 <= count <= depth - 3:
            ids = list(uniform_target_layer_ids(depth, count))
            do += f"; early SpecForge trained with a formula that gives {ids}"
        dflash.note(f"no {dflash.named('target_layer_ids')}", do)
    return given or (0,)


def write(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as SGLang 0.5.23, TensorRT-LLM 1.3 (block_size at top level), vLLM and z-lab's code read it."""
    refuse_parts(config, NAME, "anchor-first slots", "a reduced draft vocabulary", "a Markov head", "a confidence head")
    fields, section = write_fields(config, NAME)
    return {**fields, "dflash_config": section}


def write_fields(config: DrafterConfig, dialect: str) -> tuple[dict[str, object], dict[str, object]]:
    """Top level of a config.json and its `dflash_config`, without Markov and confidence heads."""
    refuse_parts(config, dialect, "latent attention (MLA)")
    one_value({kind.window for kind in config.layers} - {None}, "windows", dialect)
    causal = {kind.causal for kind in config.layers}
    if len(causal) > 1 and any(kind.causal != (kind.window is not None) for kind in config.layers):
        raise inexpressible("some layers causal and others not, other than sliding ones causal", dialect)
    section: dict[str, object] = {"target_layer_ids": list(config.target_layer_ids)}
    unless = {
        "mask_token_id": (config.mask_token_id, None),
        "input_embedding_scale": (config.embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcap, None),
        SINKS: (config.attention_sinks, False),
    }
    section |= {key: value for key, (value, default) in unless.items() if value != default}
    fields = {
        "architectures": ["DFlashDraftModel" if config.selector is None else DFLASH2_ARCHITECTURE],
        "block_size": config.rows(),
        **({} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}),
        **({} if len(causal) > 1 else {"is_causal": causal.pop()}),
        "sample_from_anchor": config.slots == "anchor-first",  # always written: its absence means either
        **write_transformer(config, rope_theta_and_scaling(config.rope)),
    }
    return fields, {**section, **dflash2_keys(config)}


DIALECT = Dialect(NAME, matches, read, write)
COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})
NOT_DSPARK = ("a reduced draft vocabulary", "convolutions", "a candidate selector")


def matches_deepspec(config: ConfigSection) -> bool:
    """config.json is in DeepSpec's dialect."""
    return any("DSpark" in name and name != SPECFORGE_ARCHITECTURE for name in config.architectures)


def matches_specforge(config: ConfigSection) -> bool:
    """config.json is in SpecForge's dialect of DSpark."""
    inner = config.section("dflash_config", falls_back=True)
    return SPECFORGE_ARCHITECTURE in config.architectures or inner.given("projector_type", str) == "dspark"


def read_dspark(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from DeepSpec's or SpecForge's keys.

    They are looked up in `dspark_config`, in `dflash_config` and at top level, as SGLang 0.5.23 does.
    """
    inner = config.section("dflash_config", falls_back=True)
    inner.only(KEYS | REFUSABLE | HARMLESS | TRAINING_KEYS, UNKNOWN)
    if config.has("dspark_config"):
        inner = replace(config.section("dspark_config"), fallback=inner)
        inner.only(KEYS | REFUSABLE | HARMLESS | TRAINING_KEYS, UNKNOWN)
    layers = make_kinds(read_windows(config), inner.given("is_causal", bool))
    return read_fields(config, inner, layers, stored, slots="anchor-first", known={"dspark_config"})


def write_deepspec(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as DeepSpec saves it. SGLang and vLLM read it if the drafter has a Markov head."""
    refuse_parts(config, "deepspec", *NOT_DSPARK)
    fields, section = write_fields(config, "deepspec")
    inner = {"dflash_config": section} if config.attention_sinks else {}  # the only place where engines read sinks
    return {**fields, **section, **inner, **markov_keys(config), "architectures": [DEEPSPEC_ARCHITECTURE]}


def write_specforge(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as SpecForge saves it."""
    refuse_parts(config, "specforge", "a drafter without a Markov head", *NOT_DSPARK)
    fields, section = write_fields(config, "specforge")
    section |= {"projector_type": "dspark", "attention_mode": "gqa", **markov_keys(config)}
    return {**fields, "dflash_config": section, "architectures": [SPECFORGE_ARCHITECTURE]}


DEEPSPEC = Dialect("deepspec", matches_deepspec, read_dspark, write_deepspec, COPIES)
SPECFORGE = Dialect("specforge", matches_specforge, read_dspark, write_specforge, COPIES)


MODELOPT_NAME = "modelopt"
MODELOPT_KEYS = {"causal", "use_swa", "swa_window_size"}
SECOND_NAMES = {"causal": "dflash_query_causal", "mask_token_id": "pard_token", "markov_rank": "dspark_markov_rank"}
"""Keys of ModelOpt -> their second names in NVIDIA's Nemotron drafters, which must agree."""
NEMOTRON_KEYS = {
    *SECOND_NAMES.values(),
    *("dspark_bonus_anchor", "dspark_fixup_head_type", "eagle_aux_hidden_state_layer_ids", "num_aux_layers"),
    "train_embed_tokens",
}
"""Keys that repeat others in NVIDIA's Nemotron drafters (the layer ids are those of `target_layer_ids` + 1)."""


def matches_modelopt(config: ConfigSection) -> bool:
    """config.json is in ModelOpt's dialect."""
    dflash = config.raw.get("dflash_config")
    return isinstance(dflash, dict) and bool(dflash.keys() & MODELOPT_KEYS)


def read_modelopt(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from ModelOpt's keys. Its DSpark heads have `shift_label` (TensorRT-LLM's tests)."""
    dflash = config.section("dflash_config", falls_back=True)
    dflash.only(MODELOPT_KEYS | KEYS | REFUSABLE | HARMLESS, UNKNOWN)
    if dflash.given("projector_type", str) == "dspark" and not any(map(dflash.has, SLOT_KEYS)):
        dflash.note("a DSpark head without shift_label", "add what it was trained with: true = anchor-first slots")
    for key, second in SECOND_NAMES.items():
        dflash.either(key, second, bool if key == "causal" else int)
    config.refuse("dspark_fixup_head_type", ("markov",), "only a Markov head is supported", PLAIN_DRAFTER)
    layers = make_kinds(_modelopt_windows(config, dflash), dflash.either("causal", "is_causal", bool))
    return read_fields(config, dflash, layers, stored, known=NEMOTRON_KEYS)


def _modelopt_windows(config: ConfigSection, dflash: ConfigSection) -> tuple[int | None, ...]:
    # With use_swa every layer slides, unless layer_types has sliding layers itself.
    window, outer = dflash.optional_integer("swa_window_size"), config.optional_integer("sliding_window")
    if window is not None and outer is not None and window != outer:
        what = f"{dflash.named('swa_window_size')} is {window} but sliding_window is {outer}"
        dflash.note(what, "keep the right one")
    if not dflash.given("use_swa", bool) or SLIDING in (config.given("layer_types", list[str]) or ()):
        return read_windows(config, window)
    return (window or dflash.integer("sliding_window"),) * read_depth(config)


def write_modelopt(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as ModelOpt 0.47 exports it, with z-lab's keys beside ModelOpt's."""
    refuse_parts(config, MODELOPT_NAME, "a reduced draft vocabulary", "a mask embedding")
    causal = one_value({kind.causal for kind in config.layers}, "causality", MODELOPT_NAME)
    window = one_value({kind.window for kind in config.layers}, "windows", MODELOPT_NAME)
    fields, section = write_fields(config, MODELOPT_NAME)
    section |= {"causal": causal, "shift_label": config.slots == "anchor-first"}
    if config.markov is not None or config.confidence is not None:
        section |= {"projector_type": "dspark", **markov_keys(config)}
        fields["architectures"] = [SPECFORGE_ARCHITECTURE]
    if window is not None:
        section |= {"use_swa": True, "swa_window_size": window}
    return {**fields, "dflash_config": section}


MODELOPT = Dialect(MODELOPT_NAME, matches_modelopt, read_modelopt, write_modelopt)

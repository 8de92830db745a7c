"""The dialects of DeepSpec, SpecForge and ModelOpt, which are z-lab's keys in another place and a few more.

DeepSpec (deepseek-ai/DeepSpec) writes DSpark's keys at top level, SpecForge (sgl-project) in `dflash_config`. With
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

from collections.abc import Collection

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import ConfigSection, Dialect, inexpressible, keys, one_value, zlab
from dflash_serve.checkpoint.dialects.keys import (
    SLIDING,
    make_kinds,
    markov_keys,
    read_windows,
    refuse_to_write,
    slot_keys,
)

DEEPSPEC_ARCHITECTURE, SPECFORGE_ARCHITECTURE = "Qwen3DSparkModel", "DSparkDraftModel"
ARCHITECTURES = (DEEPSPEC_ARCHITECTURE, "LingDSparkModel", SPECFORGE_ARCHITECTURE, "DFlashDraftModel")
"""Architectures with Qwen3's layers. DeepSpec has others: `Lfm2DSparkDraftModel` rotates neighbours, not halves."""
HARMLESS = {"num_anchors", "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"}
"""Keys of the training, which serving does not need."""
COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})
HEADS = ("slots", "markov", "confidence")


def matches_deepspec(config: ConfigSection) -> bool:
    """config.json is in DeepSpec's dialect."""
    names = config.strings("architectures") or ()
    return any("DSpark" in name and name != SPECFORGE_ARCHITECTURE for name in names)


def matches_specforge(config: ConfigSection) -> bool:
    """config.json is in SpecForge's dialect of DSpark."""
    inner = config.section("dflash_config", falls_back=True)
    named = SPECFORGE_ARCHITECTURE in (config.strings("architectures") or ())
    return named or inner.text("projector_type") == "dspark"


def read(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from DeepSpec's or SpecForge's keys, in `dflash_config` or at top level."""
    inner = config.section("dflash_config", falls_back=True)
    inner.only(zlab.KEYS | zlab.REFUSABLE | zlab.HARMLESS | HARMLESS, zlab.UNKNOWN)
    inner.refuse("attention_mode", ("gqa", "mha"), "only grouped-query attention is supported")
    layers = make_kinds(read_windows(config), inner.flag("is_causal"))
    return zlab.read_fields(config, inner, layers, stored, slots="anchor-first", architectures=ARCHITECTURES)


def write_deepspec(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as DeepSpec saves it. SGLang and vLLM read it if the drafter has a Markov head."""
    fields = _write(config, "deepspec")
    inner = fields.pop("dflash_config")
    assert isinstance(inner, dict)
    return {**fields, **inner, **markov_keys(config), "architectures": [DEEPSPEC_ARCHITECTURE]}


def write_specforge(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as SpecForge saves it."""
    if config.markov is None:
        raise inexpressible("a drafter without a Markov head", "specforge")
    fields = _write(config, "specforge")
    inner = {**zlab.section_of(fields), "projector_type": "dspark", "attention_mode": "gqa", **markov_keys(config)}
    return {**fields, "dflash_config": inner, "architectures": [SPECFORGE_ARCHITECTURE]}


def _write(config: DrafterConfig, dialect: str) -> dict[str, object]:
    refuse_to_write(config, dialect, heads=HEADS)
    causal = zlab.common_causality(config, dialect)
    return {
        **zlab.write_fields(config, dialect),
        **({} if causal is None else {"is_causal": causal}),
        **slot_keys(config),
        "block_size": config.rows(),
    }


DEEPSPEC = Dialect("deepspec", matches_deepspec, read, write_deepspec, COPIES)
SPECFORGE = Dialect("specforge", matches_specforge, read, write_specforge, COPIES)


MODELOPT_NAME = "modelopt"
MODELOPT_KEYS = {"causal", "use_swa", "swa_window_size"}
MODELOPT_ARCHITECTURES = (
    *zlab.PLAIN_ARCHITECTURES,
    *zlab.DFLASH2_ARCHITECTURES,
    "DSparkDraftModel",
    "Qwen3DSparkModel",
)


def matches_modelopt(config: ConfigSection) -> bool:
    """config.json is in ModelOpt's dialect."""
    dflash = config.raw.get("dflash_config")
    return isinstance(dflash, dict) and bool(dflash.keys() & MODELOPT_KEYS)


def read_modelopt(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """Fields of a DrafterConfig from ModelOpt's keys. Its DSpark heads have `shift_label` (TensorRT-LLM's tests)."""
    dflash = config.section("dflash_config", falls_back=True)
    dflash.only(MODELOPT_KEYS | zlab.KEYS | zlab.REFUSABLE | zlab.HARMLESS, zlab.UNKNOWN)
    if dflash.text("projector_type") == "dspark" and not any(map(dflash.has, keys.SLOT_KEYS)):
        dflash.note("a DSpark head without shift_label", "add what it was trained with: true = anchor-first slots")
    causal, is_causal = dflash.flag("causal"), dflash.flag("is_causal")
    if causal is not None and is_causal is not None and causal != is_causal:
        dflash.note(f"{dflash.named('causal')} is {causal} but is_causal is {is_causal}", "keep the right one")
    layers = make_kinds(_modelopt_windows(config, dflash), causal if is_causal is None else is_causal)
    return zlab.read_fields(config, dflash, layers, stored, architectures=MODELOPT_ARCHITECTURES)


def _modelopt_windows(config: ConfigSection, dflash: ConfigSection) -> tuple[int | None, ...]:
    # With use_swa every layer slides, unless layer_types has sliding layers itself.
    window, outer = dflash.optional_integer("swa_window_size"), config.optional_integer("sliding_window")
    if window is not None and outer is not None and window != outer:
        dflash.note(
            f"{dflash.named('swa_window_size')} is {window} but sliding_window is {outer}", "keep the right one"
        )
    if not dflash.flag("use_swa") or SLIDING in (config.strings("layer_types") or ()):
        return read_windows(config, window)
    return (window or dflash.integer("sliding_window"),) * config.integer("num_hidden_layers")


def write_modelopt(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as ModelOpt 0.47 exports it, with z-lab's keys beside ModelOpt's."""
    keys.refuse_to_write(config, MODELOPT_NAME, heads=("slots", "markov", "confidence", "convolution", "selector"))
    fields = zlab.write_fields(config, MODELOPT_NAME)
    causal = one_value({kind.causal for kind in config.layers}, "causality", MODELOPT_NAME)
    window = one_value({kind.window for kind in config.layers}, "windows", MODELOPT_NAME)
    dflash = zlab.section_of(fields)
    if config.has_mask_embedding:
        raise inexpressible("a mask embedding", MODELOPT_NAME)
    fields["is_causal"] = dflash["causal"] = causal
    fields |= keys.slot_keys(config)
    dflash |= {"shift_label": config.slots == "anchor-first", **keys.dflash2_keys(config)}
    if config.selector is not None:
        fields["architectures"] = [zlab.DFLASH2_ARCHITECTURE]
    if config.markov is not None or config.confidence is not None:
        dflash |= {"projector_type": "dspark", **keys.markov_keys(config)}
        fields["architectures"] = ["DSparkDraftModel"]
    if window is not None:
        dflash.update(use_swa=True, swa_window_size=window)
    return fields


MODELOPT = Dialect(MODELOPT_NAME, matches_modelopt, read_modelopt, write_modelopt)

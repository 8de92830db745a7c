"""NVIDIA ModelOpt's dialect (0.47, `DFlashExporter`): z-lab's form, with windows and causality inside `dflash_config`.

`causal` is always written and speaks for every layer. `use_swa` + `swa_window_size` make every layer slide although
ModelOpt leaves `layer_types` at `full_attention`: a reader that does not know them ignores the window in silence.
Resolved as vLLM does (`qwen3_dflash.py`, `_resolve_layer_attention`). What we write says it both ways: z-lab's keys
stand beside ModelOpt's, so that SGLang and TensorRT-LLM read the same.
"""

from __future__ import annotations

from collections.abc import Collection

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import head_keys, zlab
from dflash_serve.checkpoint.dialects.dialect import ConfigSection, Dialect, inexpressible, one_value
from dflash_serve.checkpoint.dialects.transformer_keys import SLIDING, make_kinds, read_windows

NAME = "modelopt"
KEYS = {"causal", "use_swa", "swa_window_size"}
ARCHITECTURES = (*zlab.PLAIN_ARCHITECTURES, *zlab.DFLASH2_ARCHITECTURES, "DSparkDraftModel", "Qwen3DSparkModel")


def matches(config: ConfigSection) -> bool:
    """Whether a config.json speaks this dialect."""
    dflash = config.raw.get("dflash_config")
    return isinstance(dflash, dict) and bool(dflash.keys() & KEYS)


def read(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """DrafterConfig's fields of a ModelOpt config.json; its DSpark heads have `shift_label` (TensorRT-LLM's tests)."""
    dflash = config.section("dflash_config", falls_back=True)
    dflash.only(KEYS | zlab.KEYS | zlab.REFUSABLE | zlab.HARMLESS, zlab.UNKNOWN)
    if dflash.text("projector_type") == "dspark" and not any(map(dflash.has, head_keys.SLOT_KEYS)):
        dflash.note("a DSpark head without shift_label", "add what it was trained with: true = anchor-first slots")
    causal, is_causal = dflash.flag("causal"), dflash.flag("is_causal")
    if causal is not None and is_causal is not None and causal != is_causal:
        dflash.note(f"{dflash.named('causal')} is {causal} but is_causal is {is_causal}", "keep the right one")
    layers = make_kinds(_windows(config, dflash), causal if is_causal is None else is_causal)
    return zlab.read_fields(config, dflash, layers, stored, architectures=ARCHITECTURES)


def _windows(config: ConfigSection, dflash: ConfigSection) -> tuple[int | None, ...]:
    """Every layer slides with use_swa, unless layer_types itself tells sliding layers from full ones."""
    window, outer = dflash.optional_integer("swa_window_size"), config.optional_integer("sliding_window")
    if window is not None and outer is not None and window != outer:
        dflash.note(
            f"{dflash.named('swa_window_size')} is {window} but sliding_window is {outer}", "keep the right one"
        )
    if not dflash.flag("use_swa") or SLIDING in (config.strings("layer_types") or ()):
        return read_windows(config, window)
    return (window or dflash.integer("sliding_window"),) * config.integer("num_hidden_layers")


def write(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as ModelOpt 0.47 exports it, and with the keys that z-lab's readers look for."""
    head_keys.refuse_to_write(config, NAME, heads=("slots", "markov", "confidence", "convolution", "selector"))
    fields = zlab.write_fields(config, NAME)
    causal = one_value({kind.causal for kind in config.layers}, "causality", NAME)
    window = one_value({kind.window for kind in config.layers}, "windows", NAME)
    dflash = zlab.section_of(fields)
    if config.has_mask_embedding:
        raise inexpressible("a mask embedding", NAME)
    fields["is_causal"] = dflash["causal"] = causal
    fields |= head_keys.slot_keys(config)
    dflash |= {"shift_label": config.slots == "anchor-first", **head_keys.dflash2_keys(config)}
    if config.selector is not None:
        fields["architectures"] = [zlab.DFLASH2_ARCHITECTURE]
    if config.markov is not None or config.confidence is not None:
        dflash |= {"projector_type": "dspark", **head_keys.markov_keys(config)}
        fields["architectures"] = ["DSparkDraftModel"]
    if window is not None:
        dflash.update(use_swa=True, swa_window_size=window)
    return fields


DIALECT = Dialect(NAME, matches, read, write)

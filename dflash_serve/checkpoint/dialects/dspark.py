"""The two dialects of DSpark drafters: DeepSpec's (deepseek-ai/DeepSpec, keys at top level) and SpecForge's
(sgl-project, keys in `dflash_config`). Where slots are anchor-first `block_size` is the drafted tokens: our B - 1.

DeepSpec's own code has no key for the convention, it is anchor-first; SGLang 0.5.23 reads `sample_from_anchor` at top
level only. DeepSpec's plain drafters (`dflash_qwen3_*_block7`) have the same architecture and `markov_rank: 0`.
"""

from __future__ import annotations

from collections.abc import Collection

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import zlab
from dflash_serve.checkpoint.dialects.dialect import ConfigSection, Dialect, inexpressible
from dflash_serve.checkpoint.dialects.head_keys import markov_keys, refuse_to_write, slot_keys
from dflash_serve.checkpoint.dialects.transformer_keys import make_kinds, read_windows

DEEPSPEC_ARCHITECTURE, SPECFORGE_ARCHITECTURE = "Qwen3DSparkModel", "DSparkDraftModel"
ARCHITECTURES = (DEEPSPEC_ARCHITECTURE, "LingDSparkModel", SPECFORGE_ARCHITECTURE, "DFlashDraftModel")
"""Those whose layers are Qwen3's; DeepSpec has others (`Lfm2DSparkDraftModel` rotates neighbours, not halves)."""
HARMLESS = {"num_anchors", "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"}
"""Of the training."""
COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})
HEADS = ("slots", "markov", "confidence")


def matches_deepspec(config: ConfigSection) -> bool:
    """Whether a config.json speaks DeepSpec's dialect."""
    names = config.strings("architectures") or ()
    return any("DSpark" in name and name != SPECFORGE_ARCHITECTURE for name in names)


def matches_specforge(config: ConfigSection) -> bool:
    """Whether a config.json speaks SpecForge's dialect of DSpark."""
    inner = config.section("dflash_config", falls_back=True)
    named = SPECFORGE_ARCHITECTURE in (config.strings("architectures") or ())
    return named or inner.text("projector_type") == "dspark"


def read(config: ConfigSection, stored: Collection[str]) -> dict[str, object]:
    """DrafterConfig's fields, of either dialect; a key may stand in `dflash_config` or at top level."""
    inner = config.section("dflash_config", falls_back=True)
    inner.only(zlab.KEYS | zlab.REFUSABLE | zlab.HARMLESS | HARMLESS, zlab.UNKNOWN)
    inner.refuse("attention_mode", ("gqa", "mha"), "only grouped-query attention is supported")
    layers = make_kinds(read_windows(config), inner.flag("is_causal"))
    return zlab.read_fields(config, inner, layers, stored, slots="anchor-first", architectures=ARCHITECTURES)


def write_deepspec(config: DrafterConfig, target: str | None) -> dict[str, object]:
    """config.json as DeepSpec saves it; SGLang and vLLM read it where there is a Markov head."""
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

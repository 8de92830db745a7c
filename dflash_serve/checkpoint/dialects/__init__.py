"""The dialects drafters are published in: the registry, and which one a config.json speaks. Heads beside DFlash are
recognised, to be refused by name, not by symptom.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import modelopt, speculators, zlab
from dflash_serve.checkpoint.dialects.dialect import PLAIN_DRAFTER, ConfigSection, Dialect
from dflash_serve.errors import Problem

__all__ = ["DIALECTS", "Dialect", "head_of_tensor", "parse"]

DIALECTS: Mapping[str, Dialect] = {d.name: d for d in (speculators.DIALECT, modelopt.DIALECT, zlab.DIALECT)}
"""The most telling first: ModelOpt's form is z-lab's with more keys."""
HEADS_BY_TENSOR = {
    "DFlash2": ("candidate_selector.", ".attention_conv.", ".mlp_conv."),
    "DSpark": ("markov_w1", "markov_w2", "markov_head.", "confidence_proj", "confidence_head."),
    "Domino": ("prefix_gru.", "embed_proj."),
    "LiLiCorr": ("lilicorr.",),
    "Laguna": ("aux_hidden_norms.", ".g_proj."),
}
"""Parts of tensor names that only such a head has (z-lab, ModelOpt and DeepSpec exports)."""


def parse(
    raw: Mapping[str, object], path: Path, problems: list[Problem], *, has_mask_embedding: bool = False
) -> tuple[DrafterConfig | None, Dialect | None]:
    """Reads a config.json, adding everything wrong with it to `problems`; then the config is None."""
    section = ConfigSection(raw, str(path), problems)
    dialect = next((one for one in DIALECTS.values() if one.matches(ConfigSection(raw, str(path), []))), None)
    inner = section.section("dflash_config", falls_back=True)
    head = _head_of_config(inner)
    if head is not None:  # its other keys would only be noise
        section.note(f"the drafter has a {head} head, which is not supported yet", PLAIN_DRAFTER)
        return None, dialect
    if dialect is None:
        section.note(
            "not a DFlash drafter: no dflash_config, no speculators_model_type, no DFlash architecture",
            f"give a drafter in one of the dialects {', '.join(DIALECTS)}",
        )
        return None, None
    before = len(problems)
    fields = dialect.read(section, has_mask_embedding)
    if len(problems) > before:
        return None, dialect
    try:
        return DrafterConfig.model_validate(fields), dialect
    except ValidationError as error:
        for fault in error.errors():
            place = ".".join(str(part) for part in fault["loc"])
            message = fault["msg"].removeprefix("Value error, ")
            section.note(f"{place}: {message}" if place else message, "correct config.json")
        return None, dialect


def head_of_tensor(name: str) -> str | None:
    """The head a tensor belongs to, if it is one we know."""
    return next((head for head, parts in HEADS_BY_TENSOR.items() if any(part in name for part in parts)), None)


def _head_of_config(config: ConfigSection) -> str | None:
    """The head that the configuration asks for: by architecture, projector type, or the sizes only that head has."""
    keys = (config.text(key) or "" for key in ("projector_type", "speculators_model_type"))
    named = " ".join([*(config.strings("architectures") or ()), *keys]).lower()
    for head in (*HEADS_BY_TENSOR, "MuseGlimmer", "xPress", "DFlare"):
        if head.lower() in named:
            return head
    if config.has("conv_kernel_size") or config.has("selector_rank"):
        return "DFlash2"
    if config.has("markov_rank") or config.flag("use_confidence_head"):
        return "DSpark"
    return None

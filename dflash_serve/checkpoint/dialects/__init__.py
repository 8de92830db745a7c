"""The dialects drafters are published in: the registry, and which one a config.json speaks. Heads that we do not run
are recognised, to be refused by name, not by symptom.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import dspark, modelopt, speculators, zlab
from dflash_serve.checkpoint.dialects.dialect import PLAIN_DRAFTER, ConfigSection, Dialect
from dflash_serve.errors import Problem

__all__ = ["DIALECTS", "Dialect", "head_of_tensor", "parse"]

DIALECTS: Mapping[str, Dialect] = {
    one.name: one for one in (speculators.DIALECT, dspark.DEEPSPEC, modelopt.DIALECT, dspark.SPECFORGE, zlab.DIALECT)
}
"""The most telling first: ModelOpt's form is z-lab's with more keys."""
HEADS_BY_TENSOR = {
    "DFlash2": ("candidate_selector.", ".attention_conv.", ".mlp_conv."),
    "DSpark": ("markov_head.", "confidence_head."),
    "Domino": ("prefix_gru.", "embed_proj."),
    "LiLiCorr": ("lilicorr.",),
    "Laguna": ("aux_hidden_norms.", ".g_proj."),
}
"""Parts of tensor names that only such a head has (z-lab, ModelOpt and DeepSpec exports)."""
SUPPORTED = ("DFlash2", "DSpark")
LATENT = ("K3DSpark", "DeepseekV3DSpark", "DeepSeekV4DSpark")
"""In architectures: DSpark heads on a backbone with latent attention."""


def parse(
    raw: Mapping[str, object], path: Path, problems: list[Problem], *, stored: Collection[str] = ()
) -> tuple[DrafterConfig | None, Dialect | None]:
    """Reads a config.json, adding everything wrong with it to `problems`; then the config is None.

    Args:
        stored: names of the checkpoint's tensors, which settle what its configuration leaves open.
    """
    section = ConfigSection(raw, str(path), problems)
    dialect = next((one for one in DIALECTS.values() if one.matches(ConfigSection(raw, str(path), []))), None)
    inner = section.section("dflash_config", falls_back=True)
    unsupported = _unsupported(inner)
    if unsupported is not None:  # its other keys would only be noise
        section.note(*unsupported)
        return None, dialect
    if dialect is None:
        section.note(
            "not a DFlash drafter: no dflash_config, no speculators_model_type, no DFlash architecture",
            f"give a drafter in one of the dialects {', '.join(DIALECTS)}",
        )
        return None, None
    before = len(problems)
    fields = dialect.read(section, stored)
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


def _unsupported(config: ConfigSection) -> tuple[str, str] | None:
    """What of a drafter we do not run, by architecture, projector type or sizes that only it has; and what to do."""
    if any(config.has(key) for key in ("dspark_block_size", "dspark_markov_rank", "dspark_target_layer_ids")):
        what = (
            "the drafter is part of its target's checkpoint (dspark_* keys, mtp.* tensors), which is not supported yet"
        )
        return what, "serve it by the engine itself, or use a drafter of its own"
    keys = (config.text(key) or "" for key in ("projector_type", "speculators_model_type"))
    named = " ".join([*(config.strings("architectures") or ()), *keys]).lower()
    if any(name.lower() in named for name in LATENT):
        what = "the drafter's layers have latent attention (MLA), which DFlash's have not; not supported yet"
        return what, PLAIN_DRAFTER
    for head in (*HEADS_BY_TENSOR, "xPress", "DFlare"):
        if head not in SUPPORTED and head.lower() in named:
            return f"the drafter has a {head} head, which is not supported yet", PLAIN_DRAFTER
    return None

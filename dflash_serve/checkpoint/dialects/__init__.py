"""The dialects drafters are published in: the registry, and which one a config.json speaks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import modelopt, speculators, zlab
from dflash_serve.checkpoint.dialects.dialect import Dialect, Target
from dflash_serve.checkpoint.dialects.heads import head_of_config, refuse_head
from dflash_serve.checkpoint.dialects.section import ConfigSection
from dflash_serve.errors import Problem

__all__ = ["DIALECTS", "Dialect", "Target", "detect", "parse"]

DIALECTS: Mapping[str, Dialect] = {d.name: d for d in (speculators.DIALECT, modelopt.DIALECT, zlab.DIALECT)}
"""The most telling first: ModelOpt's form is z-lab's with more keys."""


def detect(raw: Mapping[str, object], path: Path) -> Dialect | None:
    """The dialect of a config.json, None where it is no DFlash drafter's."""
    section = ConfigSection(raw, str(path), [])
    return next((dialect for dialect in DIALECTS.values() if dialect.matches(section)), None)


def parse(
    raw: Mapping[str, object], path: Path, problems: list[Problem], *, has_mask_embedding: bool = False
) -> tuple[DrafterConfig | None, Dialect | None]:
    """Reads a config.json, adding everything wrong with it to `problems`; then the config is None."""
    section = ConfigSection(raw, str(path), problems)
    dialect = detect(raw, path)
    inner = section.section("dflash_config", falls_back=True)
    head = head_of_config(inner)
    if head is not None:  # its other keys would only be noise
        refuse_head(head, section)
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

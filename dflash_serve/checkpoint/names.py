"""Suggestions for a misspelt target or drafter: the bundled alias, a folder beside it, a published model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_serve.catalogue import catalogue
from dflash_serve.errors import did_you_mean

ALIAS = "smollm2"
"""The bundled target, and its drafter."""


def probably_meant(name: str, *, absent: bool) -> str:
    """ "did you mean X?" for a model that was not found; "" where nothing is near.

    Args:
        absent: the hub said that it has no such repository, or the name is no hub id at all. Where the hub could not be
            asked, the name may be right, and only what differs in case, or a folder, is suggested.
    """
    known = sorted(
        {ALIAS, *(name for drafter in catalogue().drafters for name in (drafter.target, drafter.repository))}
    )
    if name in known:
        return ""
    same = next((one for one in known if one.lower() == name.lower()), None)
    if same is not None:
        return f"did you mean {same}?"
    return _folder_meant(name) or (did_you_mean(name, known) if absent else "")


def _folder_meant(name: str) -> str:
    path = Path(name).expanduser()
    return did_you_mean(path.name, _folders(path.parent), prefix=name.removesuffix(path.name)) if path.name else ""


def _folders(parent: Path) -> Iterator[str]:
    try:
        yield from sorted(path.parent.name for path in parent.glob("*/config.json"))
    except OSError:
        return

"""What the wheel carries: the drafter for the bundled target."""

from __future__ import annotations

from pathlib import Path

_DRAFTERS = {"smollm2": "smollm2-135m-instruct-dflash"}


def bundled_drafter(name: str) -> Path | None:
    """The folder of a drafter that comes with the package, or None."""
    folder = _DRAFTERS.get(name)
    return Path(__file__).parent / folder if folder else None

"""Which SGLang: the versions whose DFlash was read and run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from dflash_serve.errors import Problem

OLDEST, NEWEST = (0, 5, 22), (0, 5, 23)
DATA_PARALLEL_ATTENTION = (0, 5, 23)
"""The first whose DFlash worker runs under data-parallel attention."""

Release = tuple[int, int, int]


def installed() -> str | None:
    """The version in this environment; None where there is none (the deployment is for another machine)."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def parse(text: str) -> Release | None:
    """The three numbers of a version; None where it is no version."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def window() -> str:
    """For messages."""
    return f"{'.'.join(map(str, OLDEST))}-{'.'.join(map(str, NEWEST))}"


def is_supported(text: str) -> bool:
    """Whether a version lies in the window."""
    release = parse(text)
    return release is not None and OLDEST <= release <= NEWEST


def release_problems(text: str | None) -> Iterator[Problem]:
    """What is wrong with a version; nothing where none is installed."""
    if text is not None and not is_supported(text):
        what = f"SGLang {text} is not supported, tested {window()}"
        yield Problem(what, "sglang", f"pip install sglang=={'.'.join(map(str, NEWEST))}")

"""Caches of processes that a test starts."""

from __future__ import annotations

from pathlib import Path

from dflash_serve.common.files import cache_home


def own_cache(folder: Path) -> Path:
    """Makes a folder the XDG_CACHE_HOME of a process: it is empty, but has this machine's kernels; returns it.

    Their compilation is 11 of the 25 s of CPU time that a first start of the tiny pair takes without AVX-512.
    """
    kernels, place = cache_home() / "kernels", folder / "dflash-serve"
    for one in (kernels, place):
        one.mkdir(parents=True, exist_ok=True)
    if not (place / "kernels").exists():
        (place / "kernels").symlink_to(kernels)
    return folder

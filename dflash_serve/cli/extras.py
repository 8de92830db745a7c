"""What a verb needs beside the core, asked for before any work is done."""

from __future__ import annotations

from importlib.util import find_spec

from dflash_serve.errors import UserError


def need(extra: str, *modules: str) -> None:
    """Raises a UserError that names what is not installed, and the extra that brings it."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        do = f"pip install 'dflash-serve[{extra}]'"
        raise UserError(f"not installed: {', '.join(missing)}", where=f"extra [{extra}]", do=do)

"""Packages of the optional extras, asked for by the extra that brings them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dflash_serve.errors import UserError


def need(extra: str, *modules: str) -> None:
    """Asks for modules before any work is done; imports none of them.

    Raises:
        UserError: one is not installed; names all that are not, and the extra that brings them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}", where=f"extra [{extra}]", do=_install(extra))


def import_extra(extra: str, module: str) -> Any:
    """A module of an extra, of untyped packages that are imported where they are used.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        what = f"{module} cannot be imported ({error})"
        raise UserError(what, where=f"extra [{extra}]", do=_install(extra)) from None


def _install(extra: str) -> str:
    return f"pip install 'dflash-serve[{extra}]'"

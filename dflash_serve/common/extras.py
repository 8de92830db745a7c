"""Packages of the optional extras, asked for by the extra that brings them."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
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


def absent(error: ModuleNotFoundError, extra: str | None = None) -> UserError | None:
    """An import that failed as what a user is meant to read; None = no extra of ours brings that module.

    Args:
        extra: the one that is known to be lacking; None = the least that brings the module.
    """
    module = (error.name or "").partition(".")[0]
    bringing = [found[1] for line in _requirements() if (found := _EXTRA.search(line)) and _brings(line, module)]
    if not bringing:
        return None
    chosen = extra or next((least for least in LEAST_FIRST if least in bringing), bringing[0])
    return UserError(f"not installed: {module}", where=f"extra [{chosen}]", do=_install(chosen))


LEAST_FIRST = ("torch", "serve", "prove", "bench", "train", "engines")
"""Extras that hold one another: what the first of two brings, the second may bring, too."""
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)['"]""")


def _requirements() -> list[str]:
    try:
        return requires("dflash-serve") or []
    except PackageNotFoundError:  # a checkout that was never installed
        return []


def _brings(requirement: str, module: str) -> bool:
    """Whether it is the distribution of that module; their names differ by dashes and capitals at most."""
    named = re.match(r"[\w.-]+", requirement)
    return named is not None and re.sub(r"[-_.]+", "_", named[0]).lower() == module.lower()


def _install(extra: str) -> str:
    return f"pip install 'dflash-serve[{extra}]'"

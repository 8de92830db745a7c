"""Packages of the optional extras and engines: which are missing, and why an installed one cannot be imported."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dflash_serve.errors import Problem, UserError, first_line

LEAST_FIRST = ("torch", "serve", "prove", "bench", "train", "engines")
"""Extras in the order of their size: a later one may include an earlier one."""
_REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+).*extra == ['"](?P<extra>[\w-]+)['"]""")


def need(extra: str, *modules: str) -> None:
    """Checks that modules are installed, without importing them.

    Raises:
        UserError: lists the missing ones, and the extra that brings them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}", where=f"extra [{extra}]", do=_install(extra))


def import_problem(name: str, module: str) -> Problem | None:
    """The problem of an installed package that cannot be imported here; None if it can be, or is not installed.

    Args:
        name: of the package and its release, for the message.
        module: what is imported.
    """
    fault = _import_fault(module)
    if fault is None:
        return None
    do = "install a build of it for this environment's PyTorch and CUDA"
    return Problem(f"{name} is installed and cannot be imported here ({fault})", module.partition(".")[0], do)


@cache
def _import_fault(module: str) -> str | None:
    # Once: a second import of what failed half-way meets other errors. Any error may come out of another's package.
    if find_spec(module.partition(".")[0]) is None:
        return None
    try:
        with redirect_stdout(sys.stderr):  # where vLLM's log goes as soon as it is imported; ours is for our answers
            import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def import_extra(extra: str, module: str) -> Any:
    """Imports a module of an extra; for untyped packages.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        what = f"{module} cannot be imported ({error})"
        raise UserError(what, where=f"extra [{extra}]", do=_install(extra)) from None


def absent(error: ModuleNotFoundError, extra: str | None = None) -> UserError | None:
    """The user's error for a failed import; None if no extra of ours brings that module.

    Args:
        extra: the missing extra, if known; None = the smallest one that brings the module.
    """
    from importlib.metadata import PackageNotFoundError, requires  # 50 ms, which `--version` has no use for

    module = (error.name or "").partition(".")[0]
    try:
        requirements = requires("dflash-serve") or []
    except PackageNotFoundError:  # a checkout that was never installed
        return None
    # A distribution's name differs from its module's in dashes and capitals at most.
    found = (_REQUIREMENT.match(line) for line in requirements)
    bringing = [one["extra"] for one in found if one and re.sub(r"[-_.]+", "_", one["name"]).lower() == module.lower()]
    if not bringing:
        return None
    chosen = extra or next((least for least in LEAST_FIRST if least in bringing), bringing[0])
    return UserError(f"not installed: {module}", where=f"extra [{chosen}]", do=_install(chosen))


def _install(extra: str) -> str:
    return f"pip install 'dflash-serve[{extra}]'"

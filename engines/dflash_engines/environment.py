"""The heavy packages of this room, asked for by what they are needed for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dflash_serve.errors import UserError


def need(module: str) -> Any:
    """Imports a module of the `engines` extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        do = "pip install 'dflash-serve[engines]' (with torch==2.13.0)"
        raise UserError(f"{module} is not to be had ({error})", where="dflash-serve build", do=do) from None

"""Measurements that a user gives by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dflash_serve.common.documents import CONFIG, read_text
from dflash_serve.common.settings import (
    ENV_PREFIX,
    describe,
)
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel

COST_TABLE = f"{ENV_PREFIX}COST_TABLE"  # Environment variable: a JSON file of measured step costs
SURVIVAL = f"{ENV_PREFIX}SURVIVAL"
"""Environment variable: survival of slots 1, 2, ..., separated by commas (`doctor`, `verify` and `bench` measure it).
With a cost table, it gives the widths before launch: a table by batch size."""


def given_cost(environment: Mapping[str, str] = os.environ) -> CostModel | None:
    """The user's cost table; None = not given.

    Raises:
        UserError: the file cannot be read or is not a cost table.
    """
    path = environment.get(COST_TABLE)
    if path is None:
        return None
    from dflash_serve.speculation.costs import CostModel  # numpy, which not every install has

    try:
        return CostModel.model_validate_json(read_text(Path(path), CONFIG))
    except (UserError, ValidationError) as error:
        do = "give seconds by rows (target) and by requests (draft), or leave it out"
        why = error.what if isinstance(error, UserError) else describe(error)
        raise UserError(f"no cost table ({why})", where=path, do=do) from None


def given_survival(environment: Mapping[str, str] = os.environ) -> tuple[float, ...] | None:
    """The user's survival; None = not given.

    Raises:
        UserError: the text is not a survival.
    """
    text = environment.get(SURVIVAL)
    if text is None:
        return None
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 >= early >= late >= 0 for early, late in zip((1.0, *found), found, strict=False)):
        do = "give each slot's share of accepted drafts, never rising, such as 0.63,0.35,0.2"
        raise UserError(f"{text!r} is no survival", where=SURVIVAL, do=do)
    return found

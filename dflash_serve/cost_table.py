"""The cost table that a server may be given instead of one that it measures or guesses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.deployment import ENV_PREFIX
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel

COST_TABLE = f"{ENV_PREFIX}COST_TABLE"
"""Environment variable: a JSON file of measured costs."""


def given_cost(environment: Mapping[str, str] = os.environ) -> CostModel | None:
    """The cost table that was given; None = none.

    Raises:
        UserError: the file cannot be read or is no cost table.
    """
    path = environment.get(COST_TABLE)
    if path is None:
        return None
    try:
        return CostModel.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        do = "give seconds by rows (target) and by requests (draft), or leave it out"
        raise UserError(f"no cost table ({str(error).splitlines()[0]})", where=path, do=do) from None

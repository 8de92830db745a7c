"""Records of what was measured or learnt, kept in our cache folder: of use to the next start, worth no failure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dflash_serve.common.files import write_whole
from dflash_serve.errors import UserError

log = logging.getLogger(__name__)
Record = TypeVar("Record", bound=BaseModel)


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """None: there is none, or none that can be read."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def keep_record(path: Path, record: BaseModel, otherwise: str) -> None:
    """Written whole; that it cannot be is only logged, with what follows: `otherwise`."""
    try:
        write_whole(path, record.model_dump_json(indent=1))
    except UserError as error:
        log.warning("%s: %s", otherwise, error)

"""The base of every description that is read from a file: immutable, and strict about its keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]


class Frozen(BaseModel):
    """Immutable, and a key we do not know is an error rather than a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

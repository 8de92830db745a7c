"""An engine's own time between kernels: milliseconds a step, and a step and request, with and without speculation."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError

from dflash_serve.common.settings import Frozen, describe
from dflash_serve.errors import UserError, did_you_mean
from dflash_serve.planning.step_times import Milliseconds

FILE = "constants.json"
Evidence = Literal["fitted", "implied", "assumed", "calibrated"]


class Constants(Frozen):
    """Of one engine in one mode:

    plain step = scale * verify(b, 1) + plain_step + plain_request * b
    speculative step = scale * (verify(b, w) + draft(b, B)) + speculative_step + speculative_request * b
    """

    name: str
    backend: str
    engine_version: str
    attention_backend: str
    overlap: bool
    """The engine prepares a step while the one before it runs."""
    tables: str
    """The engine whose operator tables these belong to."""
    scale: PositiveFloat = 1.0
    plain_step: NonNegativeFloat
    speculative_step: NonNegativeFloat
    plain_request: NonNegativeFloat
    speculative_request: NonNegativeFloat
    evidence: Evidence
    """fitted: to published or measured rows; implied: by a few cells; assumed: bounded by cross-checks alone;
    calibrated: to a bench of the user's."""
    source: str
    """Which rows, or where from."""
    plain_error: Annotated[float, Field(gt=0, lt=1)]
    """Mean relative error of tokens/s without speculation, where it was held against measurements."""
    error: Annotated[float, Field(gt=0, lt=1)]
    """The same with speculation, on targets, engines or GPUs that the fit had not seen where there are any."""

    def of_step(self, batch: int, *, speculates: bool) -> Milliseconds:
        """The engine's part of a step."""
        step, request = (
            (self.speculative_step, self.speculative_request) if speculates else (self.plain_step, self.plain_request)
        )
        return Milliseconds(constants=step + request * batch)


class ConstantsFile(Frozen):
    """Sets of constants; the first of a backend is its default."""

    sets: Annotated[list[Constants], Field(min_length=1)]


def known_constants() -> list[Constants]:
    """Those that come with this package."""
    text = (files(__package__) / FILE).read_text(encoding="utf-8")
    return ConstantsFile.model_validate_json(text).sets


def constants_of(backend: str, asked: str | None) -> Constants:
    """The constants of a backend.

    Args:
        asked: the name of a known set, or a JSON file of one (`plan --calibrate` writes it); None = the default.

    Raises:
        UserError: nothing is known of this engine, or there is no such set.
    """
    known = [each for each in known_constants() if each.backend == backend]
    if asked is not None and Path(asked).suffix == ".json":
        return read_constants(Path(asked))
    if asked is not None:
        names = [each.name for each in known]
        found = [each for each in known if each.name == asked]
        if not found:
            do = (
                did_you_mean(asked, names)
                or f"known of {backend} are: {', '.join(names) or 'none'}; or give a JSON file"
            )
            raise UserError(f"no constants {asked!r}", where="--constants", do=do)
        return found[0]
    if not known:
        have = ", ".join(dict.fromkeys(each.backend for each in known_constants()))
        what = f"nothing is known of how long {backend} takes between kernels"
        raise UserError(what, where=f"--backend {backend}", do=f"use one of {have}, or give --constants a JSON file")
    return known[0]


def read_constants(path: Path) -> Constants:
    """One set from a file.

    Raises:
        UserError: it cannot be read, or is no set of constants.
    """
    try:
        return Constants.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except ValidationError as error:
        raise UserError(
            f"no constants ({describe(error)})", where=str(path), do="let `plan --calibrate` write it"
        ) from None


def as_json(constants: Constants) -> str:
    """For a file that `read_constants` reads."""
    return json.dumps(constants.model_dump(), indent=1, ensure_ascii=False) + "\n"

"""The published drafters we know, from one checked data file (`assets/drafters.json`): no network, no torch.

Fields were read in public pages, cards and repositories; null = not known. Acceptance lengths are their
publishers', at other prompts and settings each: they do not compare across rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dflash_serve.checkpoint.config import Heads
from dflash_serve.common.settings import Frozen
from dflash_serve.errors import UserError, did_you_mean

DATA = Path(__file__).parents[1] / "assets" / "drafters.json"
AUTO = "auto"  # Name of a drafter that stands for the best published one for the target and the backend
RANKED: Sequence[Literal["DFlash2", "DSpark", "DFlash"]] = ("DFlash2", "DSpark", "DFlash")
"""Mean acceptance lengths of one publisher's drafters of one target, Qwen3.5-4B: 5.97, 5.49, 4.92 (z-lab, 2026)."""
RESTRICTED = ("-NC", "-ND", "non-commercial")  # Marks of licences that restrict who may serve


class PublishedAcceptance(Frozen):
    """An acceptance length as its publisher gives it, the bonus token counted."""

    benchmark: str
    value: Annotated[float, Field(ge=1)]
    setting: str
    source: str


class CataloguedDrafter(Frozen):
    """One published drafter."""

    repository: str  # Hub id, or the bundled `smollm2`
    target: str  # Hub id of the target it was trained for
    block_size: Annotated[int, Field(ge=2)]  # B, the anchor counted
    heads: Heads
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    """A commit that was seen; checkpoints are replaced in place, so pin one where it is null."""
    licence: str | None
    acceptance_length: tuple[PublishedAcceptance, ...]
    source: str  # Source of the row's other fields
    unsupported: str | None = None  # Reason why no engine serves it, other than its heads

    @property
    def is_restricted(self) -> bool:
        """Its licence forbids commercial use or changed copies."""
        return self.licence is not None and any(mark in self.licence for mark in RESTRICTED)


class Catalogue(Frozen):
    """The data file."""

    gathered: str  # The day its rows were last looked at
    drafters: tuple[CataloguedDrafter, ...]


@cache
def catalogue() -> Catalogue:
    """The catalogue, read once."""
    return Catalogue.model_validate_json(DATA.read_text(encoding="utf-8"))


def drafters_of(target: str) -> list[CataloguedDrafter]:
    """The drafters of a target, by its hub id in any case or the part behind the slash; [] = none is known."""
    wanted = target.rstrip("/").lower()
    return [
        drafter
        for drafter in catalogue().drafters
        if wanted in (drafter.target.lower(), drafter.target.lower().rpartition("/")[2])
    ]


def unknown_target(target: str) -> UserError:
    """The error for a target without a drafter."""
    near = did_you_mean(target, sorted({drafter.target for drafter in catalogue().drafters}))
    do = near or "`dflash-serve drafters` lists them all; `dflash-serve train` makes one"
    return UserError(f"no published drafter of it is known (catalogue of {catalogue().gathered})", where=target, do=do)


def best_drafter(
    target: str, serves: Callable[[Heads], bool], untried: Collection[str] = ()
) -> CataloguedDrafter | None:
    """The drafter that `auto` takes; None where no published drafter can be served.

    Families that the backend was run with come first; then by kind, the publishers' own order (`RANKED`); then one
    whose revision is pinned; then the file's order. Drafters with a restricting licence have to be named.

    Args:
        serves: whether the backend serves a drafter with such heads.
        untried: families that it was not run with.
    """
    able = [
        drafter
        for drafter in drafters_of(target)
        if drafter.unsupported is None and not drafter.is_restricted and serves(drafter.heads)
    ]

    def order(one: CataloguedDrafter) -> tuple[bool, int, bool]:
        return one.heads.family in untried, RANKED.index(one.heads.family), one.revision is None

    return min(able, key=order, default=None)

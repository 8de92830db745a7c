"""Published acceptance of methods outside the DFlash family, by target: EAGLE-3 heads and MTP layers."""

from __future__ import annotations

from functools import cache
from typing import Literal

from dflash_serve.checkpoint.catalogue import ASSETS, PublishedAcceptance
from dflash_serve.common.settings import Frozen, PositiveInt

METHODS = ASSETS / "other_methods.json"


class OtherMethod(Frozen):
    """A method that drafts one token after another, beside one target."""

    target: str  # Hub id
    method: Literal["EAGLE-3", "MTP"]
    head: str | None  # Hub id of an EAGLE-3 head; None = the source does not say, or the target's own MTP layers
    drafted: PositiveInt  # Tokens drafted a step, with which it was measured
    acceptance_length: tuple[PublishedAcceptance, ...]

    @property
    def title(self) -> str:
        """Its method and its head."""
        own = "the target's own layers" if self.method == "MTP" else "a head that its source does not name"
        return f"{self.method}: {self.head or own}"

    @property
    def words(self) -> str:
        """A person's lines about it."""
        figures = [f"{one.value:g} {one.benchmark} ({one.setting}; {one.source})" for one in self.acceptance_length]
        example = "eagle3" if self.method == "EAGLE-3" else "mtp"
        lines = [
            f"{self.title}  for {self.target}",
            f"  {self.drafted} tokens drafted a step, one after another; by the engine: "
            f"bench --variant {example}=examples/bench/{example}.yaml",
            f"  published acceptance length: {'; '.join(figures)}",
        ]
        return "\n".join(lines)


class OtherMethods(Frozen):
    """The data file."""

    methods: tuple[OtherMethod, ...]


@cache
def _all() -> tuple[OtherMethod, ...]:
    return OtherMethods.model_validate_json(METHODS.read_text(encoding="utf-8")).methods


def other_methods(target: str | None) -> list[OtherMethod]:
    """The methods of a target, by its hub id in any case or the part behind the slash; None = of all targets."""
    wanted = None if target is None else target.rstrip("/").lower()
    return [
        one for one in _all() if wanted is None or wanted in (one.target.lower(), one.target.lower().rpartition("/")[2])
    ]

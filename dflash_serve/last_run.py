"""How far a drafter's blocks were accepted when a server last served it here: what `width: auto` begins with."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dflash_serve.checkpoint.source import recorded_survival
from dflash_serve.common.files import cache_home, write_whole
from dflash_serve.cost_table import given_survival
from dflash_serve.errors import UserError
from dflash_serve.speculation.width import AutoWidth, Step

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel

log = logging.getLogger(__name__)

LEAST: Final = 256
"""Drafted blocks from which a run tells something; what it learnt of fewer is mostly what it began with."""
HEAD: Final = 1 << 20
"""Bytes of each weight file that tell drafters apart: names, shapes and the first weights."""
EVERY: Final = 60.0
"""Seconds between two records of a run: servers are killed without a word."""


class LastRun:
    """The record of a drafter and target in our cache folder. A drafter that was trained anew is another one."""

    def __init__(self, drafter: Path, target: str) -> None:
        key = hashlib.sha256(target.encode())
        for file in sorted(drafter.glob("*.safetensors")):
            with file.open("rb") as weights:
                key.update(weights.read(HEAD))
        self.path = cache_home() / "survival" / f"{key.hexdigest()[:16]}.json"

    def survival(self) -> list[float] | None:
        """Of slots 1, 2, ...; None = no run has left any."""
        try:
            shares = [float(share) for share in json.loads(self.path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):
            return None
        return shares if shares and all(0 <= share <= 1 for share in shares) else None

    def keep(self, survival: Sequence[float]) -> None:
        """Writes it; that the cache folder cannot be written is only logged."""
        try:
            write_whole(self.path, json.dumps([round(share, 4) for share in survival]))
        except UserError as error:
            log.info("the next run begins without what this one learnt: %s", error)


class KeptWidth(AutoWidth):
    """The policy of a server of this drafter: begins with what is known of it, and leaves what it learns to the next.

    Known is DFLASH_SERVE_SURVIVAL, else what the last run here with this target learnt, else what training measured.

    Args:
        drafter: its folder.
        target: the target's name or folder.
        allowed_widths, believed: as for `AutoWidth`.

    Raises:
        UserError: DFLASH_SERVE_SURVIVAL is no survival.
    """

    def __init__(
        self,
        cost: CostModel,
        block_size: int,
        drafter: Path,
        target: str,
        allowed_widths: Sequence[int] | None = None,
        *,
        believed: bool = False,
    ) -> None:
        self._run, self._blocks, self._kept = LastRun(drafter, target), 0, time.monotonic()
        known = given_survival() or self._run.survival() or recorded_survival(drafter)
        super().__init__(cost, block_size, allowed_widths, known, believed=believed)

    def observe(self, step: Step) -> None:
        super().observe(step)
        self._blocks += sum(width > 1 for width in step.widths)
        if self._blocks >= LEAST and time.monotonic() - self._kept >= EVERY:
            self._run.keep(self.survival.overall())
            self._blocks, self._kept = LEAST, time.monotonic()

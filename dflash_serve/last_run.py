"""What a server learns of a drafter, kept for its next run here: how far blocks were accepted, and what steps took."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dflash_serve.checkpoint.source import recorded_survival
from dflash_serve.common.files import cache_home, read_record, write_whole
from dflash_serve.cost_table import given_survival
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel, LearntCosts
from dflash_serve.speculation.policy import Step
from dflash_serve.speculation.width import AutoWidth

log = logging.getLogger(__name__)

LEAST: Final = 256
"""Drafted blocks from which a run tells something; what it learnt of fewer is mostly what it began with."""
HEAD: Final = 1 << 20
"""Bytes of each weight file that tell drafters apart: names, shapes and the first weights."""
EVERY: Final = 60.0
"""Seconds between two records of a run: servers are killed without a word."""


class LastRun:
    """The record of a drafter and target in our cache folder. A drafter that was trained anew is another one.

    Args:
        drafter: its folder.
        target: the target's name or folder.
        conditions: what else the costs of steps hang on, such as the engine, its version and the device.
    """

    def __init__(self, drafter: Path, target: str, conditions: str = "") -> None:
        self.drafter = drafter
        pair = hashlib.sha256(target.encode())
        for file in sorted(drafter.glob("*.safetensors")):
            with file.open("rb") as weights:
                pair.update(weights.read(HEAD))
        self.path = cache_home() / "survival" / f"{pair.hexdigest()[:16]}.json"
        pair.update(conditions.encode())
        self.costs_path = cache_home() / "learnt" / f"{pair.hexdigest()[:16]}.json"

    def survival(self) -> list[float] | None:
        """Of slots 1, 2, ...; None = no run has left any."""
        try:
            shares = [float(share) for share in json.loads(self.path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):
            return None
        return shares if shares and all(0 <= share <= 1 for share in shares) else None

    def costs(self) -> LearntCosts | None:
        """What steps took, by the costs that the server began with; None = no run has left any."""
        return read_record(self.costs_path, LearntCosts)

    def keep(self, survival: Sequence[float], costs: LearntCosts | None = None) -> None:
        """Writes what is given; that the cache folder cannot be written is only logged."""
        try:
            write_whole(self.path, json.dumps([round(share, 4) for share in survival]))
            if costs:
                write_whole(self.costs_path, costs.model_dump_json())
        except UserError as error:
            log.info("the next run begins without what this one learnt: %s", error)


class KeptWidth(AutoWidth):
    """The policy of a server of this drafter: begins with what is known of it, and leaves what it learns to the next.

    Known is DFLASH_SERVE_SURVIVAL, else what the last run here with this target learnt, else what training measured.

    Args:
        run: the record of this drafter and target.
        allowed_widths, believed: as for `AutoWidth`.
        learnt: `cost` is a guess, of which this is known; what this run learns of it is kept, too. None = `cost` was
            measured when this run began.

    Raises:
        UserError: DFLASH_SERVE_SURVIVAL is no survival.
    """

    def __init__(
        self,
        cost: CostModel,
        block_size: int,
        run: LastRun,
        allowed_widths: Sequence[int] | None = None,
        *,
        believed: bool = False,
        learnt: LearntCosts | None = None,
    ) -> None:
        self._run, self._blocks, self._kept = run, 0, time.monotonic()
        self._is_guess = learnt is not None
        known = given_survival() or run.survival() or recorded_survival(run.drafter)
        super().__init__(cost, block_size, allowed_widths, known, believed=believed, learnt=learnt)

    def observe(self, step: Step) -> None:
        super().observe(step)
        self._blocks += sum(width > 1 for width in step.widths)
        if self._blocks >= LEAST and time.monotonic() - self._kept >= EVERY:
            costs = self.times.learnt if self._is_guess else None
            self._run.keep(self.acceptance.overall(), costs)
            self._blocks, self._kept = LEAST, time.monotonic()

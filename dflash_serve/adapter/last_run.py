"""Measurements of a server's run that its next run on this machine starts from: survival of slots, and step times."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dflash_serve.checkpoint.source import read_survival, recorded_survival
from dflash_serve.common.files import cache_home, write_whole
from dflash_serve.common.store import read_record
from dflash_serve.deployment.description import Model
from dflash_serve.deployment.variables import given_survival
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel, LearntCosts
from dflash_serve.speculation.policy import GuardedPolicy, Pace, Step, WidthPolicy
from dflash_serve.speculation.width import AutoWidth

log = logging.getLogger(__name__)

LEAST: Final = 256
"""Smallest number of drafted blocks that is recorded; with fewer, estimates are mostly the initial ones."""
HEAD: Final = 1 << 20  # Bytes of each weight file that identify a drafter: names, shapes and the first weights
EVERY: Final = 60.0  # Seconds between two records of a run; a server may be killed at any time


class LastRun:
    """The record of a drafter and target in our cache folder. A retrained drafter has a new record.

    Args:
        drafter: folder.
        target: whose weights decide what is accepted; its revision counts, too.
        conditions: other influences on step times, such as the engine, its version and the device.
    """

    def __init__(self, drafter: Path, target: Model, conditions: str = "") -> None:
        self.drafter = drafter
        own = (target.model, target.revision, None if target.quantization == "none" else target.quantization)
        pair = hashlib.sha256(" ".join(part for part in own if part).encode())
        for file in sorted(drafter.glob("*.safetensors")):
            with file.open("rb") as weights:
                pair.update(weights.read(HEAD))
        self.path = cache_home() / "survival" / f"{pair.hexdigest()[:16]}.json"
        pair.update(conditions.encode())
        self.costs_path = cache_home() / "learnt" / f"{pair.hexdigest()[:16]}.json"

    def survival(self) -> list[float] | None:
        """Survival of slots 1, 2, ... in earlier runs; None = no record."""
        return read_survival(self.path)

    def costs(self) -> LearntCosts | None:
        """Corrections of the initial step costs from earlier runs; None = no record."""
        return read_record(self.costs_path, LearntCosts)

    def keep(self, survival: Sequence[float] | None, costs: LearntCosts | None = None) -> None:
        """Writes a record of what is known; a failure to write is only logged."""
        try:
            if survival is not None:
                write_whole(self.path, json.dumps([round(share, 4) for share in survival]))
            if costs:
                write_whole(self.costs_path, costs.model_dump_json())
        except UserError as error:
            log.info("this run's survival and step times cannot be recorded: %s", error)


def pace_of(policy: WidthPolicy) -> Pace | None:
    """The pace that a server's policy counts; None = its width is fixed, so it expects nothing."""
    inner = policy.policy if isinstance(policy, GuardedPolicy) else policy
    return inner.pace if isinstance(inner, KeptWidth) else None


class KeptWidth(AutoWidth):
    """`width: auto` of a server, which starts from a known survival and records its own for the next run.

    The survival is DFLASH_SERVE_SURVIVAL, else the one of the last run with this target, else the one from training.

    Args:
        run: the record of this drafter and target.
        allowed_widths, believed: as for `AutoWidth`.
        learnt: corrections of an estimated `cost`; this run's are recorded too. None = `cost` was measured at start.
        trimmed: the engine verifies fewer slots than its steps say, so that this run's survival is too low to record.

    Raises:
        UserError: DFLASH_SERVE_SURVIVAL is not a survival.
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
        trimmed: bool = False,
    ) -> None:
        self._run, self._blocks, self._kept = run, 0, time.monotonic()
        self._is_guess, self._trimmed = learnt is not None, trimmed
        known = given_survival() or run.survival() or recorded_survival(run.drafter)
        super().__init__(cost, block_size, allowed_widths, known, believed=believed, learnt=learnt)
        self.pace = Pace()

    def observe(self, step: Step) -> None:
        self.pace.add(step, self.expected_rate)
        super().observe(step)
        self._blocks += len(step.widths) - step.widths.count(1)
        if self._blocks >= LEAST and time.monotonic() - self._kept >= EVERY:
            costs = self.times.learnt if self._is_guess else None
            self._run.keep(None if self._trimmed else self.acceptance.overall(), costs)
            self._blocks, self._kept = LEAST, time.monotonic()

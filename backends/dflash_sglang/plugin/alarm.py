"""An alarm on acceptance: what collapses while serving is switched off, what is too good to be true is reported.

A drafter whose acceptance falls far below its own past has most often lost its footing (weights updated under it, K/V
read from the wrong place), not met a hard prompt. Acceptance of exactly 1 over thousands of tokens is no better: no
drafter is right always, but a verification that compares a block with itself is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)
RECENT, PAST = 256, 8192
"""Tests of slot 1 (one a request and step) that the two averages remember, roughly."""
COLLAPSED = 0.2
"""Recent survival of slot 1, as a share of its past, at which speculation is switched off."""
RECOVERED = 0.5
"""The same, of a probe, at which it comes back."""
LEAST_PAST = 0.05
"""A drafter that never was any good cannot collapse."""
PROBE_EVERY, PROBE_TESTS = 512, 64
"""Steps without speculation until it is tried again, and tests of slot 1 that a trial takes."""
PERFECT = 4096
"""Drafted tokens, accepted without an exception, that are one too many."""


class Alarm:
    """Watches slot 1, which is tested whenever anything is drafted."""

    def __init__(self) -> None:
        self.raised = False
        """Speculation is switched off, but for probes."""
        self.too_good = False
        """Everything was accepted."""
        self._recent = self._past = 0.0
        self._tests = 0
        self._waited = 0
        self._probe = [0, 0]
        self._all_accepted: int | None = 0

    def allows(self) -> bool:
        """Whether the coming step may draft; asked once a step."""
        if not self.raised:
            return True
        self._waited += 1
        return self._waited > PROBE_EVERY

    def verified(self, width: int, accepted: Sequence[int]) -> None:
        """A step of `width` slots, and how many drafted tokens of each request it accepted."""
        if width == 1 or not accepted:
            return
        passed = sum(count > 0 for count in accepted)
        self._watch_for_perfection(width, accepted)
        if self.raised:
            self._probed(passed, len(accepted))
            return
        for good in [1.0] * passed + [0.0] * (len(accepted) - passed):
            self._tests += 1
            self._recent += (good - self._recent) / min(self._tests, RECENT)
            self._past += (good - self._past) / min(self._tests, PAST)
        if self._tests > 4 * RECENT and self._past > LEAST_PAST and self._recent < COLLAPSED * self._past:
            self.raised, self._waited, self._probe = True, 0, [0, 0]
            text = "dflash-serve: acceptance has collapsed: slot 1 survives %.3f of the time, %.3f before; not drafting"
            logger.warning(text, self._recent, self._past)

    def _probed(self, passed: int, tests: int) -> None:
        self._probe[0] += passed
        self._probe[1] += tests
        if self._probe[1] < PROBE_TESTS:
            return
        survival = self._probe[0] / self._probe[1]
        self._waited, self._probe = 0, [0, 0]
        if survival >= RECOVERED * self._past:
            self.raised, self._recent = False, survival
            logger.warning("dflash-serve: acceptance is back (slot 1 survives %.3f of the time); drafting", survival)

    def _watch_for_perfection(self, width: int, accepted: Sequence[int]) -> None:
        if self._all_accepted is None:
            return
        if min(accepted) < width - 1:
            self._all_accepted, self.too_good = None, False
            return
        self._all_accepted += sum(accepted)
        if self._all_accepted >= PERFECT and not self.too_good:
            self.too_good = True
            text = "dflash-serve: all of %d drafted tokens were accepted, which no drafter achieves: are they verified?"
            logger.error(text, self._all_accepted)

"""An alarm on acceptance: drafting stops when acceptance collapses, and acceptance of exactly 1 is reported.

Acceptance far below a drafter's own past is seldom a hard prompt. It mostly means that weights were updated under the
drafter or that its K/V is read from the wrong place. Acceptance of exactly 1 over thousands of tokens means that a
block is compared with itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)
RECENT, PAST = 256, 8192
"""Memory of the two averages, in tests of slot 1 (one for each request and step)."""
COLLAPSED = 0.2
"""Recent over past survival of slot 1 below which drafting stops."""
RECOVERED = 0.5
"""A probe's survival over past survival from which drafting starts again."""
LEAST_PAST = 0.05
"""Past survival below which there is no alarm: such a drafter was never good."""
PROBE_EVERY, PROBE_TESTS = 512, 64
"""Steps without drafts between probes, and tests of slot 1 in a probe."""
PERFECT = 4096
"""Drafted tokens, all of them accepted, at which an error is logged."""


class Alarm:
    """Watches slot 1, which every draft tests."""

    def __init__(self) -> None:
        self.raised = False
        """True while only probes are drafted."""
        self.too_good = False
        """True while every drafted token has been accepted."""
        self._recent = self._past = 0.0
        self._tests = 0
        self._waited = 0
        self._probe = [0, 0]
        self._all_accepted: int | None = 0

    def allows(self) -> bool:
        """True if the next step may draft; call it once a step."""
        if not self.raised:
            return True
        self._waited += 1
        return self._waited > PROBE_EVERY

    def verified(self, width: int, accepted: Sequence[int]) -> None:
        """Takes a step of `width` slots and the accepted drafted tokens of each request."""
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

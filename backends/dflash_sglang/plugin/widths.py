"""The width that a batch is verified with, and an alarm on acceptance. Needs no SGLang."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dflash_serve.errors import UserError
from dflash_serve.speculation.policy import FixedWidth, Step, WidthPolicy
from dflash_sglang.launch_plan import WIDTH_VARIABLE

from .results import STEPS, StepResult

logger = logging.getLogger(__name__)
RECENT, PAST = 256, 8192  # memory of the two averages, in tests of slot 1 (one for each request and step)
COLLAPSED = 0.2  # recent over past survival of slot 1 below which drafting stops
RECOVERED = 0.5  # a probe's survival over past survival from which drafting starts again
LEAST_PAST = 0.05  # past survival below which there is no alarm: such a drafter was never good
PROBE_EVERY, PROBE_TESTS = 512, 64  # steps without drafts between probes, and tests of slot 1 in a probe
PERFECT = 4096  # drafted tokens, all of them accepted, at which an error is logged


class Alarm:
    """Stops drafting when acceptance collapses, and reports acceptance of exactly 1. Watches slot 1, which every draft
    tests.

    Acceptance far below a drafter's own past is seldom a hard prompt. It mostly means that weights were updated under
    the drafter or that its K/V is read from the wrong place. Acceptance of exactly 1 over thousands of tokens means
    that a block is compared with itself.
    """

    def __init__(self) -> None:
        self.raised = False  # True while only probes are drafted
        self.too_good = False  # True while every drafted token has been accepted
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


logger = logging.getLogger(__name__)
MOST_REQUESTS = 65536
"""Beyond so many the oldest requests are forgotten: SGLang does not tell of the end of aborted ones."""
AUTO = 0  # value of `asked_width` for an automatic width


def asked_width(environment: Mapping[str, str] = os.environ) -> int | None:
    """The width that was asked for, AUTO where it follows the policy; None = none was: SGLang's own whole blocks.

    Raises:
        UserError: neither a number nor `auto`.
    """
    text = environment.get(WIDTH_VARIABLE)
    if text is None:
        return None
    if text == "auto":
        return AUTO
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    what = f"{text!r} is neither a number of slots nor auto"
    raise UserError(what, where=WIDTH_VARIABLE, do="correct it; without speculation, leave --speculative-algorithm out")


class BatchWidths:
    """One width for a whole batch, from a policy that gives each request a width of its own."""

    def __init__(self, policy: WidthPolicy, offered: Collection[int], alarm: Alarm | None = None) -> None:
        self.policy, self.offered = policy, sorted(offered)
        self.alarm = alarm or Alarm()
        self._running: dict[str, None] = {}  # requests that have not ended, oldest first

    def choose(self, request_ids: Sequence[str], context_tokens: int = 0) -> int:
        """The width of the coming step: the smallest offered one that is enough for every request.

        Args:
            context_tokens: K/V tokens of all requests together.
        """
        self._running.update(dict.fromkeys(request_ids))
        wanted = self.offered[-1]
        while len(self._running) > MOST_REQUESTS:
            self.finished(next(iter(self._running)))
        with self._giving_up():
            wanted = max(self.policy.widths(request_ids, context_tokens), default=1)
        if len(self.offered) > 1 and not self.alarm.allows():
            wanted = 1
        return next((width for width in self.offered if width >= wanted), self.offered[-1])

    def verified(self, step: StepResult) -> None:
        """Learns from a step."""
        known = [(request_id, count) for request_id, count in step.accepted if request_id in self._running]
        whole = len(known) == step.requests  # else its time is not that of these rows
        ids, counts = [request_id for request_id, _ in known], [count for _, count in known]
        was = self.alarm.raised
        self.alarm.verified(step.width, counts)
        if self.alarm.raised != was:
            STEPS.report_alarm(self.alarm.raised)
        widths = [step.width] * len(known)
        with self._giving_up():
            self.policy.observe(Step(ids, widths, counts, step.seconds if whole else None, step.context_tokens))

    def finished(self, request_id: str) -> None:
        """Forgets a request."""
        self._running.pop(request_id, None)
        with self._giving_up():
            self.policy.forget(request_id)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Replaces a policy that fails by the widest width: an error here would end the scheduler and all requests."""
        try:
            yield
        except Exception:
            logger.exception("dflash-serve: the choice of widths failed; blocks of one width are verified from now on")
            self.policy = FixedWidth(self.offered[-1])

"""Which width a batch is verified with: the policy's widths of its requests, made one for all. Needs no SGLang."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dflash_serve.errors import UserError
from dflash_serve.speculation.policy import FixedWidth, Step, WidthPolicy
from dflash_sglang.launch_plan import WIDTH_VARIABLE

from .alarm import Alarm
from .results import STEPS, StepResult

logger = logging.getLogger(__name__)
MOST_REQUESTS = 65536
"""Beyond so many the oldest requests are forgotten: SGLang does not tell of the end of aborted ones."""
AUTO = 0
"""Value of `asked_width` for an automatic width."""


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
        self._running: dict[str, None] = {}
        """Requests that have not ended, oldest first."""

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

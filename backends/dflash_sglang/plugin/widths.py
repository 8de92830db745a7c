"""The width that was asked for, and the width that a batch is verified with. Needs no SGLang."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from dflash_serve.errors import UserError
from dflash_serve.speculation.policy import Step, WidthPolicy
from dflash_sglang.launch_plan import WIDTH_VARIABLE

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

    def __init__(self, policy: WidthPolicy, offered: Collection[int]) -> None:
        self.policy, self.offered = policy, sorted(offered)
        self._running: set[str] = set()
        self._ahead: tuple[list[str], int] | None = None  # a decision that no launch has taken, and its requests

    def observe(self, step: Step) -> None:
        """Takes a step's result, and decides for the next one: the device works meanwhile, before a launch it waits."""
        self.policy.observe(step)
        ids = [str(request_id) for request_id in step.request_ids]
        self._ahead = (ids, self._decided(ids, step.context_tokens)) if ids else None

    def choose(self, request_ids: Sequence[str], context_tokens: int = 0) -> int:
        """The width of the coming step: the smallest offered one that is enough for every request.

        Every decoding step of SGLang has all running requests, so those that are not in it have ended.

        Args:
            context_tokens: K/V tokens of all requests together.
        """
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead and ahead[0] == request_ids else self._decided(request_ids, context_tokens)

    def _decided(self, request_ids: Sequence[str], context_tokens: int) -> int:
        for ended in self._running.difference(request_ids):
            self.policy.forget(ended)
        self._running = set(request_ids)
        wanted = max(self.policy.widths(request_ids, context_tokens), default=1)
        return next((width for width in self.offered if width >= wanted), self.offered[-1])

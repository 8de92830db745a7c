"""A width policy that tests can foresee: whole blocks for few requests, no speculation for many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
MOST = "SGLANG_CPU_DRAFTS_FOR"
"""Requests up to which a batch is drafted for; unset: the plug-in's own policy decides."""


def install() -> None:
    """Puts it in the place of the policy of `width: auto`."""
    if MOST in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(CREATE_WORKER, _with_it, HookType.AROUND)


def _with_it(create: Any, *args: Any) -> Any:
    from dflash_sglang.plugin.worker import WidthWorker

    setattr(WidthWorker, "_policy", lambda own, cost, offered: ByNumber(offered))  # noqa: B010
    return create(*args)


class ByNumber:
    """A `WidthPolicy`."""

    def __init__(self, offered: Sequence[int]) -> None:
        self.widest, self.paused = max(offered), False

    def widths(self, request_ids: Sequence[object], *_: Any) -> list[int]:
        self.paused = len(request_ids) > int(os.environ[MOST])
        return [1 if self.paused else self.widest] * len(request_ids)

    def observe(self, step: Any) -> None:
        pass

    def forget(self, request_id: object) -> None:
        pass

"""What SGLang runs in each of its processes (entry point `sglang.srt.plugins`).

Nothing is changed until a server asks for DFLASH or DFLASH_SERVE: then its draft is checked before anything is loaded,
loaded strictly, and measured. SGLang only logs what a plug-in raises while it is installed, so refusals are raised
later, where they stop the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from dflash_serve.errors import Problem

from . import upstream
from .draft_check import draft_problems
from .plan import NATIVE, OURS
from .release import installed, is_supported, window
from .resolution import being_resolved

logger = logging.getLogger(__name__)
MOST = 8
"""Problems in one message."""


def install() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(upstream.RESOLUTION, before_resolution, HookType.AROUND)
    version = installed() or "unknown"
    if not is_supported(version):
        logger.error("dflash-serve: SGLang %s is not supported, tested %s", version, window())
        return
    HookRegistry.register(upstream.CREATE_WORKER, before_worker, HookType.AROUND)
    from .algorithm import register

    register()


def before_resolution(resolve: Callable[[Any], None], server_args: Any) -> None:
    """In the main process, before SGLang looks at what speculation is asked for.

    Raises:
        ValueError: this SGLang or this draft will not do; the message says why.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    asked = resolving_view(server_args)
    if (asked.speculative_algorithm or "").upper() in (NATIVE, OURS):
        refuse(upstream.problems())
        refuse(draft_problems(asked))
        from .request_guard import guard_requests

        guard_requests()
    with being_resolved(server_args):
        resolve(server_args)


def before_worker(create: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """In a scheduler, before SGLang's own DFlash worker is built."""
    if algorithm.is_dflash():
        refuse(upstream.problems(upstream.OF_SCHEDULER))
        watch_worker()
    return create(algorithm, server_args)


def watch_worker() -> None:
    """Strict loading, and the counting of results."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .results import on_result
    from .strict_load import load_strictly
    from .timing import on_worker_built

    HookRegistry.register(upstream.LOAD_WEIGHTS, load_strictly, HookType.AROUND)
    HookRegistry.register(upstream.RESULT, on_result, HookType.AROUND)
    HookRegistry.register(f"{upstream.WORKER}.__init__", on_worker_built, HookType.AROUND)
    HookRegistry.apply_hooks()


def refuse(problems: Iterable[Problem]) -> None:
    """Does nothing where there are none.

    Raises:
        ValueError: the problems; in a server that starts, its end.
    """
    found = list(problems)
    if found:
        more = [f"(and {len(found) - MOST} more)"] if len(found) > MOST else []
        raise ValueError("dflash-serve: " + "\n".join([*map(str, found[:MOST]), *more]))

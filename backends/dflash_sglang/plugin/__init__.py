"""The plug-in that SGLang loads into its processes (entry point `sglang.srt.plugins`): hooks around algorithm DFLASH.

Nothing is changed until a server asks for DFLASH: then its draft is checked before anything is loaded, loaded strictly,
and measured; and where a width is asked for (`DFLASH_SERVE_SPECULATION__WIDTH`), our worker runs in the place of
SGLang's. An SGLang that is not the one we were tested with runs as if we were not installed, but for a warning.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from dflash_serve.deployment import given_cost, given_survival
from dflash_serve.errors import Problem, UserError, refuse
from dflash_sglang.facts import RELEASES
from dflash_sglang.launch_plan import NATIVE

from .drafts import StrictLoad, draft_problems
from .host import CREATE_WORKER, LOAD_WEIGHTS, QUEUE, RESOLUTION, RESULT, ROW_HEADROOM, WORKER
from .requests import guarded
from .widths import AUTO, asked_width

logger = logging.getLogger(__name__)
STRICT = StrictLoad()
ASIDE = "dflash-serve steps aside, and SGLang runs as it does without it: %s"


def install() -> None:
    """Registers our hooks; the entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RESOLUTION, before_resolution, HookType.AROUND)
    HookRegistry.register(CREATE_WORKER, before_worker, HookType.AROUND)


def usable() -> bool:
    """True if this SGLang is the tested release; else a warning is logged."""
    problem = next(RELEASES.problems(RELEASES.installed() or "unknown"), None)
    if problem is not None:
        logger.warning(ASIDE, problem)
    return problem is None


def before_resolution(resolve: Callable[[Any], None], server_args: Any) -> None:
    """Runs in the main process, before SGLang looks at what speculation is asked for.

    Raises:
        ValueError: this draft or these settings will not do; the message says why.
    """
    if _asks_for_dflash(server_args) and usable():
        try:
            from sglang.srt.arg_groups.overrides import resolving_view
        except ImportError as error:
            logger.warning(ASIDE, error)
        else:
            asked = resolving_view(server_args)
            refuse(draft_problems(asked))
            refuse(width_problems(asked))
    resolve(server_args)


def _asks_for_dflash(server_args: Any) -> bool:  # called under every SGLang release
    return str(getattr(server_args, "speculative_algorithm", None)).upper() == NATIVE


def width_problems(server_args: Any) -> list[Problem]:
    """Problems of the width that the environment asks for, with these arguments."""
    try:
        width = asked_width()
        if width == AUTO:
            given_cost()
            given_survival()
    except UserError as error:
        return [Problem(error.what, error.where, error.do)]
    if width is None or not server_args.enable_lora:
        return []
    what = "LoRA's graphs are made for one width, and a width is asked for"
    return [Problem(what, "--enable-lora", "verify whole blocks (speculation.width = block_size), or leave LoRA out")]


def before_worker(create: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """Runs in a scheduler, before SGLang's DFlash worker is built: where a width is asked for, ours takes its place."""
    theirs = create(algorithm, server_args)
    try:
        return ours(theirs, server_args) if algorithm.is_dflash() and usable() else theirs
    except (ImportError, AttributeError) as error:
        logger.warning(ASIDE, error)
        return theirs
    except Exception:
        logger.exception("dflash-serve steps aside: its worker could not be prepared, SGLang's own runs")
        return theirs


def ours(theirs: type, server_args: Any) -> type:
    """The worker to build where SGLang would build `theirs`, and everything that it is watched by."""
    from sglang.srt.arg_groups.overrides import resolving_view

    # A name that is gone shows here, before anything of SGLang is hooked.
    from . import metrics, results  # noqa: F401
    from .worker import WidthWorker

    for name in (ROW_HEADROOM, LOAD_WEIGHTS, RESULT, QUEUE):
        pkgutil.resolve_name(name)
    watch_worker()
    if asked_width() in (None, resolving_view(server_args).speculative_num_draft_tokens):
        return theirs
    if theirs is not WidthWorker.__base__:
        logger.warning("dflash-serve: this platform has a worker of its own (%s), which runs alone", theirs.__name__)
        return theirs
    return WidthWorker


def watch_worker() -> None:
    """Makes the worker that is built next load its draft strictly, count its results and time its drafter."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .results import STEPS

    STRICT.active = True
    HookRegistry.register(ROW_HEADROOM, room_for_a_step, HookType.AROUND)
    HookRegistry.register(LOAD_WEIGHTS, STRICT, HookType.AROUND)
    HookRegistry.register(RESULT, STEPS.on_result, HookType.AROUND)
    HookRegistry.register(QUEUE, guarded, HookType.AROUND)
    HookRegistry.register(f"{WORKER}.__init__", on_worker_built, HookType.AROUND)
    HookRegistry.apply_hooks()


def room_for_a_step(headroom: Callable[[], int]) -> int:
    """Entries of a request's row beyond its context: at least what a decoding step reserves at any page size.

    SGLang 0.5.23 makes this room only for pages of several tokens. With pages of one token a request that comes to
    the end of its context then writes into the next request's row (sglang#33579).
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    return max(headroom(), int(get_alloc_reserve_per_decode() + get_alloc_page_size()) - 1)


def on_worker_built(build: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """Around the worker's constructor: its draft is loaded when it ends."""
    from .metrics import watch

    try:
        build(worker, *args, **kwargs)
    finally:
        STRICT.active = False
    watch(worker)

"""What SGLang loads into its processes (entry point `sglang.srt.plugins`): hooks, and the algorithm DFLASH_SERVE.

Nothing is changed until a server asks for DFLASH or DFLASH_SERVE: then its draft is checked before anything is loaded,
loaded strictly, and measured. SGLang only logs what a plug-in raises while it is installed, so refusals are raised
later, where they stop the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflash_sglang.facts import TESTED, installed_version, is_supported
from dflash_sglang.launch_plan import NATIVE, OURS

from .guards import draft_problems, guard_requests, load_strictly, refuse
from .metrics import on_result, on_worker_built
from .upstream import CREATE_WORKER, LOAD_WEIGHTS, OF_SCHEDULER, RESOLUTION, RESULT, WORKER, upstream_problems

logger = logging.getLogger(__name__)
_BEING_RESOLVED: list[Any] = []
"""The arguments that SGLang is resolving: it hands a registered algorithm a stand-in for them."""


def install() -> None:
    """Registers our hooks and our algorithm; the entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RESOLUTION, before_resolution, HookType.AROUND)
    version = installed_version() or "unknown"
    if not is_supported(version):
        logger.error("dflash-serve: SGLang %s is not supported, tested %s", version, TESTED)
        return
    HookRegistry.register(CREATE_WORKER, before_worker, HookType.AROUND)
    register_algorithm()


def before_resolution(resolve: Callable[[Any], None], server_args: Any) -> None:
    """Runs in the main process, before SGLang looks at what speculation is asked for.

    Raises:
        ValueError: this SGLang or this draft will not do; the message says why.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    asked = resolving_view(server_args)
    if (asked.speculative_algorithm or "").upper() in (NATIVE, OURS):
        refuse(upstream_problems())
        refuse(draft_problems(asked))
        guard_requests()
    with _being_resolved(server_args):
        resolve(server_args)


def before_worker(create: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """Runs in a scheduler, before SGLang's own DFlash worker is built."""
    if algorithm.is_dflash():
        watch_worker()
    return create(algorithm, server_args)


def watch_worker() -> None:
    """Makes the worker that is built next load its draft strictly, count its results and time its drafter.

    Raises:
        ValueError: this SGLang will not do.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    refuse(upstream_problems(OF_SCHEDULER))
    HookRegistry.register(LOAD_WEIGHTS, load_strictly, HookType.AROUND)
    HookRegistry.register(RESULT, on_result, HookType.AROUND)
    HookRegistry.register(f"{WORKER}.__init__", on_worker_built, HookType.AROUND)
    HookRegistry.apply_hooks()


def register_algorithm() -> None:
    """Makes `--speculative-algorithm DFLASH_SERVE` known: to SGLang's scheduler DFlash, with a worker of ours."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(OURS) is None:
        algorithm = type("DFlashServe", (DFlashAnswers, CustomSpecAlgo), {})
        SpeculativeAlgorithm.register(OURS, supports_overlap=True, spec_class=algorithm)(worker_class)


def worker_class(server_args: Any) -> type:
    """What SGLang's scheduler builds for DFLASH_SERVE."""
    watch_worker()  # which looks its imports up first
    from .worker import DFlashServeWorker

    return DFlashServeWorker


class DFlashAnswers:
    """What SGLang's DFLASH answers its scheduler; mixed into SGLang's CustomSpecAlgo, which lacks the last four."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Resolves block size, steps, draft attention and the rest as for DFLASH, on the arguments themselves.

        Raises:
            ValueError: what SGLang refuses for DFLASH.
        """
        from sglang.srt.arg_groups.speculative_hook import _handle_dflash

        _handle_dflash(_BEING_RESOLVED[-1] if _BEING_RESOLVED else server_args)

    def build_disagg_draft_input(self, *args: Any) -> Any:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        return SpeculativeAlgorithm.DFLASH.build_disagg_draft_input(*args)

    def create_future_map(self, device: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        needs = dict(zip(("needs_cpu_seq_lens", "needs_confidence_relay"), args, strict=False))
        return FutureMap(device, self, pool, **{"needs_cpu_seq_lens": True, **needs, **kwargs})

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None


@contextmanager
def _being_resolved(server_args: Any) -> Iterator[None]:
    """Remembers the arguments while SGLang resolves them."""
    _BEING_RESOLVED.append(server_args)
    try:
        yield
    finally:
        _BEING_RESOLVED.pop()

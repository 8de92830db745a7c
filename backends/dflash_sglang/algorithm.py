"""DFLASH_SERVE: the algorithm that we register with SGLang. To its scheduler it is DFlash, with a worker of ours."""

from __future__ import annotations

from typing import Any

from .plan import OURS


def register() -> None:
    """Makes `--speculative-algorithm DFLASH_SERVE` known. Once in each process."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(OURS) is None:
        registered = SpeculativeAlgorithm.register(OURS, supports_overlap=True, spec_class=_algorithm_class())
        registered(worker_class)


def worker_class(server_args: Any) -> type:
    """What SGLang's scheduler builds."""
    from . import upstream
    from .plugin import refuse, watch_worker

    refuse(upstream.problems(upstream.OF_SCHEDULER))  # before the worker's module imports them
    watch_worker()
    from .worker import DFlashServeWorker

    return DFlashServeWorker


def _algorithm_class() -> type:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DFlashServe(CustomSpecAlgo):  # type: ignore[misc]
        """Answers as SGLang's own DFLASH does, also where CustomSpecAlgo has no answer (the last four)."""

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
            from .resolution import resolve_as_dflash

            resolve_as_dflash(server_args)

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

        def build_disagg_draft_input(self, *args: Any) -> Any:
            return SpeculativeAlgorithm.DFLASH.build_disagg_draft_input(*args)

    return DFlashServe

"""Our counters beside vLLM's own on /metrics, in the API server's process (entry point `vllm.stat_logger_plugins`)."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from dflash_serve.adapter.counters import TRIMMED, PaceCounters, SlotCounters
from dflash_vllm.facts import EARLIER

from . import METHODS, STRICT, is_ours, proof
from .widths import taken_pace, trims

logger = logging.getLogger(__name__)


class SpeculationMetrics(StatLoggerBase):  # type: ignore[misc]
    """Counts slots and widths of every step, on servers that are ours.

    Raises:
        ValueError: the server is ours, and our plug-in was not loaded.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0, *_: Any, **__: Any) -> None:
        self.counts = is_ours(vllm_config)
        if self.counts:
            proof()
            asked = vllm_config.speculative_config
            if asked.method in METHODS and (others := set(asked.draft_model_config.architectures) - STRICT.keys()):
                logger.warning("dflash-serve: not checked in vLLM: tensors and settings of %s", sorted(others))
            model = str(vllm_config.model_config.served_model_name)
            self.trims = trims(asked)
            block, labels = asked.num_speculative_tokens + 1, {"model_name": model, "engine": str(engine_index)}
            self.counters = SlotCounters(block, trims=self.trims, earlier=EARLIER, **labels)
            self.pace = PaceCounters(**labels)

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        """Counts one step of the engine. Raises nothing: an error of a stat logger ends vLLM's engine."""
        if not self.counts or scheduler_stats is None:  # of several API servers one is told, for all
            return
        try:
            self._record(scheduler_stats.spec_decoding_stats, iteration_stats)
            if (pace := taken_pace(scheduler_stats)) is not None:
                self.pace.write(*pace)
        except Exception:
            logger.exception("dflash-serve: slots and widths are no longer counted")
            self.counts = False

    def _record(self, drafting: Any, iteration: Any) -> None:
        """`drafting`: statistics of requests with drafts; `iteration`: of all decoded tokens."""
        decoding = len(iteration.inter_token_latencies_iter) if iteration else 0
        accepted = dict(enumerate(drafting.num_accepted_tokens_per_pos if drafting else (), start=1))
        if self.trims:  # vLLM's numbers of drafted tokens are those before trimming
            drafts = drafting.num_drafts if drafting else 0
            self.counters.count({1: decoding - drafts, TRIMMED: drafts}, {}, accepted)
            return
        offered = list(drafting.num_draft_tokens_per_pos) if drafting else []
        # A step of width w offers slots 1 to w - 1, so this is the number of steps of widths 1, 2, ...
        steps = [here - wider for here, wider in zip([decoding, *offered], [*offered, 0], strict=True)]
        by_width, by_slot = (dict(enumerate(counts, start=1)) for counts in (steps, offered))
        self.counters.count(by_width, by_slot, accepted)


# A later release may add abstract methods to its base class; without this they would end servers that are not ours.
SpeculationMetrics.__abstractmethods__ = frozenset()

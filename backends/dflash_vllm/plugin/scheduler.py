"""vLLM's schedulers with `width: auto`: at every step our policy says how many tokens are drafted.

One process schedules for all ranks, so all of them draft the same. Drafts of step t are verified in step t + 1. If the
policy fails, whole blocks are drafted from then on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dflash_serve.adapter.last_run import LastRun, pace_of
from dflash_serve.deployment.description import Model
from dflash_vllm.facts import GUESSED_COSTS, RELEASES

from . import proof
from .widths import observed, own_width, send_pace, trims, width_policy

logger = logging.getLogger(__name__)


class _FollowsLoad:
    """Mixed into a scheduler, which then is its own table from batch size to drafted tokens.

    Raises:
        ValueError: our plug-in was not loaded; vLLM was started without a schedule, which names the widths that get
            CUDA graphs; or it was started with the other one of our two classes.
    """

    running: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        host: Any = self
        proof()
        if host.dynamic_sd_lookup is None:
            raise ValueError("dflash-serve: needs num_speculative_tokens_per_batch_size, without data parallelism")
        if bool(host.scheduler_config.async_scheduling) is not (is_async := isinstance(self, AsyncScheduler)):
            other = "WidthScheduler" if is_async else "AsyncWidthScheduler"
            raise ValueError(f"dflash-serve: for this async_scheduling use --scheduler-cls {__name__}.{other}")
        wide = sorted({drafted + 1 for drafted in host.dynamic_sd_lookup[1:] if drafted})
        run, trimmed = _last_run(host.vllm_config), trims(host.vllm_config.speculative_config)
        self.widths = width_policy(host.num_spec_tokens + 1, wide, run, trimmed=trimmed)
        self._has_failed, self._whole_block = False, max(wide, default=1) - 1
        self._context_tokens = 0
        self._begun: float | None = None  # Time of the last result, or of the scheduling after an idle time
        host.dynamic_sd_lookup = self

    def __getitem__(self, batch_size: int) -> int:
        """Tokens that this step drafts for each request."""
        return self._guarded(self._choose)

    def _guarded(self, ask: Callable[[], int | None]) -> int:
        """The answer, or a whole block from the first failure on: an error in a scheduler would end all requests."""
        try:
            return self._whole_block if self._has_failed else ask() or 0
        except Exception:
            logger.exception("dflash-serve: the choice of widths failed; whole blocks are verified from now on")
            self._has_failed = True
            return self._whole_block

    def _choose(self) -> int:
        self._context_tokens = sum(request.num_computed_tokens for request in self.running)
        ids = [request.request_id for request in self.running]
        own = [own_width(request.sampling_params) for request in self.running]
        undraftable = [one for one, most in zip(ids, own, strict=True) if most == 1]
        chosen = self.widths.widths(ids, self._context_tokens, *([undraftable] if undraftable else []))
        return max((min(width, most or width) for width, most in zip(chosen, own, strict=False)), default=1) - 1

    def _learn(self, scheduler_output: Any, result: Any, seconds: float | None) -> None:
        self.widths.observe(observed(scheduler_output, result, seconds, self._context_tokens))
        for request_id in scheduler_output.finished_req_ids:
            self.widths.forget(request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._begun = self._begun or perf_counter()
        for request in self.running:  # a step drafts as much for all of them
            most = own_width(request.sampling_params)
            if most is not None:
                request.spec_token_ids = request.spec_token_ids[: most - 1]
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of a step, with ours for the process of /metrics (`metrics`)."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        pace = pace_of(self.widths)
        if stats is not None and pace is not None:
            with suppress(Exception):
                send_pace(stats, pace)
        return stats

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = perf_counter()
        seconds = None if self._begun is None else now - self._begun
        # Before vLLM cuts the tokens off that lie behind a stop.
        self._guarded(lambda: self._learn(scheduler_output, model_runner_output, seconds))
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._begun = now if self.running else None
        return outputs


class WidthScheduler(_FollowsLoad, Scheduler):  # type: ignore[misc]
    """For servers that schedule after the last step has ended: CPUs."""


class AsyncWidthScheduler(_FollowsLoad, AsyncScheduler):  # type: ignore[misc]
    """For servers that schedule while the last step is computed: GPUs."""


def _last_run(config: Any) -> LastRun:
    model, parallel = config.model_config, config.parallel_config
    conditions = [RELEASES.installed(), current_platform.get_device_name(), str(model.dtype), model.quantization]
    conditions += [parallel.world_size, os.environ.get(GUESSED_COSTS)]
    conditions += [trims(config.speculative_config)]  # steps of trimmed blocks are shorter
    target = Model(model=model.model, revision=model.revision)
    return LastRun(Path(config.speculative_config.model), target, json.dumps(conditions))

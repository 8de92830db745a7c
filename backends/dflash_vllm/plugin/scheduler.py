"""vLLM's schedulers with `width: auto`: at every step our policy says how many tokens are drafted.

One process schedules for all ranks, so all of them draft the same. Drafts of step t are verified in step t + 1. If the
policy fails, whole blocks are drafted from then on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import vllm
from dflash_serve.last_run import KeptWidth, LastRun
from dflash_vllm.schedule import GUESSED_COSTS

from . import proof
from .steps import StepClock, decoding_steps, is_even
from .widths import LiveWidths, make_widths

logger = logging.getLogger(__name__)


class _Lookup:
    """Takes the place of vLLM's table from batch size to drafted tokens."""

    def __init__(self, scheduler: _FollowsLoad) -> None:
        self.scheduler = scheduler

    def __getitem__(self, batch_size: int) -> int:
        return self.scheduler.drafted_tokens()


class _FollowsLoad:
    """Mixed into a scheduler.

    Raises:
        ValueError: our plug-in was not loaded; vLLM was started without a schedule, which names the widths that get
            CUDA graphs; or it was started with the other one of our two classes.
    """

    is_async: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        host: Any = self
        proof()
        if host.dynamic_sd_lookup is None:
            raise ValueError("dflash-serve: needs num_speculative_tokens_per_batch_size, without data parallelism")
        if bool(host.scheduler_config.async_scheduling) is not self.is_async:
            other = "WidthScheduler" if self.is_async else "AsyncWidthScheduler"
            raise ValueError(f"dflash-serve: for this async_scheduling use --scheduler-cls {__name__}.{other}")
        wide = sorted({drafted + 1 for drafted in host.dynamic_sd_lookup[1:] if drafted})
        run = _last_run(host.vllm_config)
        policy = partial(KeptWidth, block_size=host.num_spec_tokens + 1, run=run, allowed_widths=wide)
        self.widths: LiveWidths | None = make_widths(policy, run.costs())  # None = the policy has failed
        self._whole_block = max(wide, default=1)
        self._clock = StepClock()
        self._accepted: dict[str, int] = {}
        host.dynamic_sd_lookup = _Lookup(self)

    def drafted_tokens(self) -> int:
        """Tokens that this step drafts for each request."""
        running, width = self.running, self._whole_block  # type: ignore[attr-defined]
        with self._giving_up():
            if self.widths is not None:
                width = self.widths.choose([request.request_id for request in running], _context_tokens(running))
        return width - 1

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.scheduled()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Called for every request whose drafted tokens were verified."""
        self._accepted[kwargs["request_id"]] = kwargs["num_accepted_tokens"]
        return super().make_spec_decoding_stats(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        seconds = self._clock.answered()
        self._accepted = {}
        tokens = _context_tokens(self.running)  # type: ignore[attr-defined]
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        with self._giving_up():
            self._learn(scheduler_output, seconds, tokens)
        self._clock.settled(busy=bool(self.running))  # type: ignore[attr-defined]
        return outputs

    def _learn(self, scheduler_output: Any, seconds: float | None, context_tokens: int) -> None:
        if self.widths is None:
            return
        steps = decoding_steps(scheduler_output, self._accepted)
        is_clean = is_even(scheduler_output, steps)
        self.widths.verified(steps, seconds=seconds if is_clean else None, context_tokens=context_tokens)
        self.widths.finished(list(scheduler_output.finished_req_ids))

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Drops a policy that fails: an error here would end vLLM's engine and all its requests."""
        try:
            yield
        except Exception:
            logger.exception("dflash-serve: the choice of widths failed; whole blocks are drafted from now on")
            self.widths = None


class WidthScheduler(_FollowsLoad, Scheduler):  # type: ignore[misc]
    """For servers that schedule after the last step has ended: CPUs."""

    is_async = False


class AsyncWidthScheduler(_FollowsLoad, AsyncScheduler):  # type: ignore[misc]
    """For servers that schedule while the last step is computed: GPUs."""

    is_async = True


def _last_run(config: Any) -> LastRun:
    model, parallel = config.model_config, config.parallel_config
    conditions = [vllm.__version__, current_platform.get_device_name(), str(model.dtype), model.quantization]
    conditions += [parallel.world_size, os.environ.get(GUESSED_COSTS)]
    return LastRun(Path(config.speculative_config.model), model.model, json.dumps(conditions))


def _context_tokens(running: Any) -> int:
    return sum(request.num_computed_tokens for request in running)

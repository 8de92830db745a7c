"""The worker of DFLASH_SERVE: SGLang's own, whose blocks are verified as far as it pays.

Full blocks, prefills and idle rounds are SGLang's own code. A narrower step drafts the same full block (the drafter was
trained on it) and verifies its first slots; a step of width 1 does not draft at all.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from .calibration import measure
from .guards import refuse
from .host import worker_problems
from .metrics import listen, unwatched
from .narrow_step import WidthState, build_states, narrow_step
from .widths import BatchWidths, allowed_widths, asked_width, given_cost, make_policy

logger = logging.getLogger(__name__)


class DFlashServeWorker(DFlashWorkerV2):  # type: ignore[misc]
    """DFlash with a width of its own for every step; to our steps a `HostWorker`."""

    block_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse(worker_problems(self))
        if self.selector is not None or self.lilicorr is not None or self._is_domino:
            raise ValueError("dflash-serve: DFLASH_SERVE runs plain DFlash drafts; use DFLASH for this one")
        self.widths: BatchWidths | None = None
        """None until everything is allocated: full blocks."""
        self.states: dict[int, WidthState] = {}
        """What verifies a step, by width, for those narrower than B."""

    def init_cuda_graphs(self) -> None:
        """The last step of start-up: everything is allocated, and costs can be measured."""
        super().init_cuda_graphs()
        if self._need_mamba_verify_commit or get_parallel().attn_dp_enabled:
            logger.warning("dflash-serve: this target's blocks are always verified whole")
            return
        fixed = asked_width()
        narrow = {1, *allowed_widths(self.block_size)} if fixed is None else {min(fixed, self.block_size)}
        self.states = build_states(self, narrow - {self.block_size})
        with unwatched(self.draft_model_runner):
            cost = None if fixed is not None else given_cost() or measure(self, self.states)
        self.widths = BatchWidths(make_policy(self.block_size, cost))
        listen(self.widths)
        if cost is not None:
            logger.info("dflash-serve: measured costs %s", cost.model_dump_json())

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """One round of the scheduler."""
        width = self._width_of(batch)
        if width == self.block_size:
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        self._validate_phase1_sampling_support(batch)
        return narrow_step(self, self.states[width], batch, on_publish, grammar_barrier)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Forgets a request; SGLang tells that it has ended."""
        if self.widths is not None:
            self.widths.finished(rid)

    def _width_of(self, batch: Any) -> int:
        mode = batch.forward_mode
        decoding = not (mode.is_extend() or batch.is_extend_in_batch or mode.is_idle())
        if self.widths is None or batch.spec_info is None or not decoding:
            return int(self.block_size)
        return self.widths.choose([str(request.rid) for request in batch.reqs])

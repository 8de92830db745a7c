"""SGLang's DFlash worker with a width for every step.

Whole blocks, prefills and idle rounds are SGLang's own code. A narrower step drafts the whole block, as the drafter was
trained to, and verifies its first slots; a step of width 1 does not draft. After any failure at start-up SGLang's own
whole blocks are served, with a warning that gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from dflash_serve.adapter.last_run import KeptWidth, LastRun
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.deployment.description import Model
from dflash_serve.deployment.variables import given_cost
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth, GuardedPolicy, WidthPolicy
from dflash_sglang.settings import asked_width, narrow_widths

from .penalties import Penalties
from .ranks import RankError, Ranks
from .refusals import own_width
from .results import RESULTS, BatchWidths
from .startup import build_states, measure, timed
from .step import run_step

logger = logging.getLogger(__name__)
WHOLE = "dflash-serve: blocks are verified whole, as SGLang does by itself: %s"


class WidthWorker(DFlashWorkerV2):  # type: ignore[misc]
    """SGLang's worker, with steps of other widths than its own."""

    block_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts_penalties = False  # True if penalised requests are answered; read by `refusals.guarded`
        self.widths: BatchWidths | None = None  # None: only whole blocks are verified
        self._own: tuple[list[int], torch.Tensor | None] = ([], None)  # requests' own widths, and on the device
        self.states: dict[int, SpecRuntimeState] = {}  # attention and graphs by width, for widths below B

    def init_cuda_graphs(self) -> None:
        """The last step of start-up: everything is allocated, and costs can be measured."""
        super().init_cuda_graphs()
        reason = whole_only(self)
        if reason is None:
            self.penalties = Penalties(self.model_runner.model_config.vocab_size, self.device)
            self.counts_penalties = True
            self.ranks = Ranks(get_parallel().tp_group)
            try:
                reason = self._start()
            except RankError as error:
                reason = str(error)
        if reason is not None:
            self._serve_whole(reason)

    def _serve_whole(self, reason: str) -> None:
        self.states, self.widths = {}, None
        logger.warning(WHOLE, reason)

    def _start(self) -> str | None:  # returns the reason if it cannot
        fixed = asked_width() or None
        if fixed is not None and fixed >= self.block_size:
            return None if fixed == self.block_size else f"width {fixed} is beyond the block of {self.block_size} slots"
        self.states = build_states(self, narrow_widths(self.block_size) if fixed is None else [fixed], self.ranks)
        if (fixed or 1) not in self.states:
            return f"width {fixed or 1} could not be prepared"
        self._whole_graphs = self.model_runner.decode_cuda_graph_runner
        offered = sorted({*self.states, self.block_size}) if fixed is None else [fixed]
        if fixed is not None:  # kernels are compiled now, not at the first request
            timed(self, (1, fixed, 1), self._step, self.ranks)
        policy = FixedWidth(fixed) if fixed is not None else self._policy(self._costs(offered), offered)
        self.widths = BatchWidths(GuardedPolicy(policy, offered[-1]), offered)
        if self.ranks.is_first and fixed is None:  # it decides for all
            RESULTS.listeners.append(self.widths.observe)
        return None

    def _policy(self, cost: CostModel, offered: list[int]) -> WidthPolicy:
        args = self.server_args
        try:
            drafter = local_folder(args.speculative_draft_model_path, args.speculative_draft_model_revision)
        except UserError:  # from a store that only SGLang knows
            drafter = Path(args.speculative_draft_model_path)
        target = Model(model=args.model_path, revision=args.revision)
        return KeptWidth(cost, self.block_size, LastRun(drafter, target), offered)

    def _costs(self, offered: list[int]) -> CostModel:  # the first rank's table, else measured together
        cost = self.ranks.from_first("the cost table", given_cost)
        if cost is None:
            cost = measure(self, offered, self._step, self.ranks)
        logger.info("dflash-serve: costs %s", cost.model_dump_json())
        return cost

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """One round of the scheduler."""
        mode = batch.forward_mode
        extends = mode.is_extend() or batch.is_extend_in_batch
        if self.counts_penalties and extends and not mode.is_idle():
            self.penalties.at_prefill(batch)
        if extends or mode.is_idle() or batch.spec_info is None:
            RESULTS.launched()
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        known = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
        context = 0 if known is None else int(known.sum())  # K/V tokens of all requests together
        result = self._step(batch, self._decided(batch, context), on_publish, grammar_barrier)
        RESULTS.launched(result, context_tokens=context)
        return result

    def _step(self, batch: Any, width: int, on_publish: Any = None, grammar_barrier: Any = None) -> Any:
        """One decoding step: SGLang's own code for a whole block without penalties, else ours."""
        penalties = self.penalties if self.counts_penalties and self.penalties.concern(batch.reqs) else None
        most = self._own_widths(batch.reqs, width)
        if width == self.block_size and penalties is None and most is None:
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        self._validate_phase1_sampling_support(batch)
        how = {"penalties": penalties, "most": most, "on_publish": on_publish, "grammar_barrier": grammar_barrier}
        return run_step(self, batch, width, self.states.get(width), **how)

    def _own_widths(self, requests: Sequence[Any], width: int) -> torch.Tensor | None:
        """Most tokens that each request may gain in a step of this width [n]; None: all of them."""
        own = [min(width, own_width(request) or width) for request in requests]
        if min(own, default=width) == width:
            return None
        if self._own[0] != own:  # else nothing is sent to the device
            self._own = own, torch.tensor(own, device=self.device)
        return self._own[1]

    def _next_accept_bonus_buffers(self, bs: int) -> Any:
        """Buffers of the fused acceptance, as wide as the step; SGLang's own are as wide as the block."""
        accepted, gained, bonus, tokens, lengths = super()._next_accept_bonus_buffers(bs)
        return accepted, gained, bonus, tokens.view(-1)[: bs * self.block_size].view(bs, self.block_size), lengths

    def _decided(self, batch: Any, context: int) -> int:  # by the first rank
        if self.widths is not None and self.model_runner.decode_cuda_graph_runner is not self._whole_graphs:
            self._serve_whole("SGLang has captured its CUDA graphs again, and those of other widths are out of date")
        if self.widths is None:
            return self.block_size
        if len(self.widths.offered) == 1:  # nothing to decide, and nothing to tell other ranks
            return self.widths.offered[0]
        choice = 0
        if self.ranks.is_first:
            most = {request.rid: own for request in batch.reqs if (own := own_width(request)) is not None}
            choice = self.widths.choose([request.rid for request in batch.reqs], context, most)
        return self.ranks.number_from_first(choice)


def whole_only(worker: WidthWorker) -> str | None:
    """The reason why this server verifies whole blocks only; None: other widths can be verified."""
    mamba = get_exec().mamba
    kind = type(getattr(worker.model_runner.attn_backend, "linear_attn_backend", None)).__name__
    states_by_width = {"GDNAttnBackend": True, "Mamba2AttnBackend": mamba.mamba_backend == "triton"}.get(kind, False)
    reasons = {
        # Where requests come prefilled, penalties would miss them.
        "it is one half of a disaggregated pair": get_disagg().disaggregation_mode != "null",
        "the draft has a LiLiCorr or Domino head": worker.lilicorr is not None or worker._is_domino,
        "the drafter's block has one slot": worker.block_size < 2,
        f"the target's recurrent layers ({kind}) take one width": worker._need_mamba_verify_commit
        and (not states_by_width or mamba.enable_linear_replayssm_spec),
        "attention is data-parallel": get_parallel().attn_dp_enabled,
        "attention is context-parallel": get_parallel().attn_cp_size > 1,
        "two batches overlap": get_exec().overlap.enable_two_batch_overlap,
        "prefill and decode share the GPU": get_disagg().enable_pdmux,
        "the device is an NPU": str(worker.device).startswith("npu"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)

"""`VLLMSettings`: a deployment, its target and its drafter, and the settings of vLLM that follow from them.

`static_schedule` is a table of widths that vLLM follows without any code of ours in it: it depends on the load, and
neither on requests nor on the machine (`speculation.allocation`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from dflash_serve.adapter.draft_layouts import stored_bytes
from dflash_serve.adapter.launch import EngineLaunch
from dflash_serve.checkpoint.config import BF16
from dflash_serve.deployment.gpus import GIB, GPUS
from dflash_serve.deployment.variables import given_cost, given_survival

from .drafter_rules import V1_VARIABLE, verifies_whole_blocks
from .facts import FACTS, RELEASES

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel

Row = list[int]  # vLLM's: first batch size, last one, drafted tokens (slots without the anchor)
ROWS, ROWS_OF_A_LARGE_GPU, ROWS_OF_A_SMALL_GPU = 8192, 16384, 2048
LARGE_GPU, SMALL_GPU = 160 * GIB, 70 * GIB  # an A100 counts as small, too
"""vLLM's defaults of max_num_batched_tokens, and the memory from which on it takes the second (engine/arg_utils.py)."""
DEFAULT_REQUESTS = 256  # tables of widths need a number; vLLM's own 1024 blocks would be more rows than a step has
OVERHEAD = 6 * GIB  # CUDA context, NCCL, workspaces, CUDA graphs, activations of a prefill
KNEE_OF_A_CPU, BANDWIDTH_OF_A_CPU = 8, 5e10
"""A guess of a CPU's bytes/s, and of the rows from which on its arithmetic takes longer than reading the weights. Too
much costs less than too little, and served steps correct what follows from it."""
NOT_TRIMMED = {
    *("enable-lora", "enable-return-routed-experts", "return-sampling-mask"),  # refused beside it (config/vllm.py)
    *("attention-backend", "attention-config", "compilation-config", "enforce-eager", "optimization-level"),
}
"""Arguments beside which vLLM's adaptive verification does not run, or may not."""
UNIFORM_ATTENTION = ("Llama4", "MiniMaxM3")
"""Beginnings of the architectures whose attention has no CUDA graphs for queries of any lengths: Llama 4's chunks
(layers/attention/chunked_local_attention.py) and MiniMax-M3's chosen blocks (models/minimax_m3/common)."""
ALIKE = ("block-size", "attention-backend", "attention-config", "disable-hybrid-kv-cache-manager")
"""Arguments that NIXL's handshake compares, or on which the layout of the K/V depends (kv_connector/v1/nixl)."""
SM_OF_A_GB10 = 121
GRAPH_ROWS, GRAPH_ROWS_OF_SM100 = 512, 1024  # most rows of a step with a CUDA graph (vLLM's config/vllm.py)


class VLLMSettings(EngineLaunch):
    """A launch of vLLM, as far as its checks need it."""

    name = "vllm"
    title = FACTS.title
    loggers = ("vllm", "uvicorn", "uvicorn.access", "uvicorn.error")
    logging_variable = "VLLM_LOGGING_CONFIG_PATH"
    alike = ALIKE

    @property
    def max_batch_size(self) -> int:
        """Requests at once: a number of ours where the deployment leaves it open."""
        return self.requests_of_a_copy or DEFAULT_REQUESTS

    @property
    def verifies_whole_blocks(self) -> bool:
        """vLLM's own drafting runs, not our widths."""
        return self.drafter is not None and verifies_whole_blocks(self.drafter)

    @property
    def untrimmed(self) -> str | None:
        """Reason why vLLM's adaptive verification does not trim drafted blocks; None = it does.

        It verifies as many drafted tokens of each request as pay, by its own estimate of acceptance and its own
        measurement of steps (vllm#52228), and needs attention whose graphs take queries of any lengths.
        """
        given, compute = sorted(NOT_TRIMMED & {*self.in_effect}), self.compute or 0
        theirs = "vLLM's adaptive verification"
        reasons = (
            (self.is_half, "one half of a disaggregated pair verifies whole blocks"),
            (self.deployment.speculation.width != "auto", "the width is given"),
            (self.v1_runner, f"vLLM's V1 model runner lacks {theirs}"),
            (self.target.recurrent, f"{theirs} does not cover recurrent layers (GDN, Mamba)"),
            (self.target.latent, f"{theirs} does not cover all kernels of latent attention (MLA)"),
            (
                self.target.architecture.startswith(UNIFORM_ATTENTION),
                f"{theirs} does not cover the attention of {self.target.architecture}",
            ),
            (not compute, f"{theirs} does not run on all GPUs, and which one serves is not known (hardware.gpu)"),
            (compute // 10 not in (9, 10), f"{theirs} needs SM90 or SM100, this is SM{compute}"),
            (given_cost() is not None, "the costs that were given are of whole blocks"),
            (bool(given), f"{theirs} may not run beside {', '.join(given)}"),
        )
        return next((reason for holds, reason in reasons if holds), None)

    @property
    def never_narrow(self) -> str | None:
        untrimmed = self.untrimmed
        if self.drafter is None or len(self.widths) > 1 or untrimmed is None:
            return None
        family = f" with a {self.drafter.family} drafter" if self.verifies_whole_blocks else ""
        return f"whole blocks{family}: {untrimmed}"

    @property
    def always_drafts(self) -> bool:
        # Without our scheduler its adaptive verification alone follows the load.
        return self.measures_costs and len(self.widths) == 1

    @property
    def measures_costs(self) -> bool:
        return self.drafter is not None and self.untrimmed is None

    @property
    def compute(self) -> int | None:
        """Compute capability of the GPU that the deployment names, else of this machine's; 90 = SM90."""
        if self.on_cpu:
            return None
        return self.gpu.compute if self.gpu else _installed_compute()

    @property
    def draft_kernels(self) -> str | None:
        """vLLM's name of the drafter's attention kernels; None = vLLM chooses them.

        On SM121 it chooses FlashAttention 2, which for a block that is not causal ended a server at its start
        (vllm#50707).
        """
        plain = self.drafter is not None and self.drafter.latent is None
        return "TRITON_ATTN" if plain and self.compute == SM_OF_A_GB10 else None

    @property
    def widths(self) -> tuple[int, ...]:
        """Every width that a step may have, 1 = no draft. At most four, because each gets CUDA graphs of its own.

        Each divides the next one, so that graphs of all can have the same rows.
        """
        if self.block_size is None:
            return ()
        if self.verifies_whole_blocks or self.is_half:
            return (self.block_size,)
        width = self.deployment.speculation.width
        if width != "auto":
            assert isinstance(width, int)
            return (width,)
        if self.untrimmed is None:
            return (1, self.block_size)
        most = min(3, self.max_batch_size - 1)  # one batch size a width: see `every_width`
        widths = [self.block_size]
        while widths[0] > 1:
            widths.insert(0, max(width for width in range(1, widths[0]) if widths[0] % width == 0))
        return (1, *widths[1:][-most:]) if most > 0 else (self.block_size,)

    @property
    def graph_sizes(self) -> list[int] | None:
        """Rows for which vLLM is to capture CUDA graphs; None = its own choice.

        A step uses the smallest captured size that holds its rows, if that was captured for its width, else no full
        graph. So sizes are multiples of every width (vLLM's own are multiples of 8); a full batch has one, too.
        """
        own = {"cudagraph-capture-sizes", "max-cudagraph-capture-size", "compilation-config", "enforce-eager"}
        *narrow, block = self.widths
        chosen = bool(own & {*self.in_effect})
        if self.on_cpu or not narrow or self.untrimmed is None or block.bit_count() == 1 or chosen:
            return None
        most = min(GRAPH_ROWS_OF_SM100 if (self.compute or 0) // 10 == 10 else GRAPH_ROWS, 2 * self.block_rows)
        return sorted({*narrow, *range(block, most + 1, block), min(most, self.max_batch_size)})

    def schedule(self) -> list[Row] | None:
        """vLLM's table of widths, where costs and a survival were given for an automatic one; None = another kind.

        Raises:
            UserError: the cost table or the survival that was given is none.
        """
        cost, survival = given_cost(), given_survival()
        if cost is None or survival is None or len(self.widths) < 2:
            return None
        return static_schedule(cost, survival, self.widths, self.max_batch_size)

    @property
    def has_our_scheduler(self) -> bool:
        """Our scheduler chooses widths inside vLLM, at every step.

        Raises:
            UserError: the cost table or the survival that was given is none.
        """
        return len(self.widths) > 1 and self.schedule() is None

    @property
    def guessed_costs(self) -> str:
        """A `CostModel`'s JSON by the models' sizes: reading the weights alone, then arithmetic alone."""
        assert self.drafter is not None
        assert self.block_size is not None
        target = self.target
        idle = 1 - target.experts_per_token / target.experts if target.experts else 0.0
        head = self.drafter.vocab_size * self.drafter.hidden_size * BF16
        gpu = self.gpu or GPUS["h100"]
        rate = self.deployment.parallel.tensor * (BANDWIDTH_OF_A_CPU if self.on_cpu else gpu.bandwidth)
        step = (target.weight_bytes - idle * target.expert_bytes) / rate
        draft = (stored_bytes(self.checkpoint, self.drafter) + head) / rate
        knee = KNEE_OF_A_CPU if self.on_cpu else int(gpu.flops / gpu.bandwidth)
        blocks = max(1, knee // self.block_size)
        return json.dumps(
            {
                "target": {1: step, knee: step, 8 * knee: 8 * step},
                "draft": {1: draft, blocks: draft, 8 * blocks: 8 * draft},
            }
        )

    @property
    def v1_runner(self) -> bool:
        """vLLM's first model runner serves."""
        return self.on_cpu or os.environ.get(V1_VARIABLE) == "0"

    @property
    def dtype(self) -> str:
        """Arithmetic of the target and its drafter."""
        asked = self.deployment.hardware.dtype
        return asked if asked != "auto" else "float32" if self.on_cpu else "bfloat16"

    @property
    def rows(self) -> int:
        """Rows of one step of the target; more where a full batch of blocks, or a prompt in one piece, needs them."""
        limits = self.deployment.limits
        own, gpu = ROWS, self.gpu
        if gpu is not None and (gpu.memory < SMALL_GPU or gpu.compute == 80):
            own = ROWS_OF_A_SMALL_GPU
        elif gpu is not None and gpu.memory >= LARGE_GPU:
            own = ROWS_OF_A_LARGE_GPU
        given = {name.replace("_", "-"): value for name, value in self.engine_args.items()}
        if given.get("enable-chunked-prefill") is False or given.get("no-enable-chunked-prefill") is True:
            own = max(own, limits.max_model_len or self.target.shape.max_position_embeddings or 0)
        return limits.max_num_tokens or max(own, self.block_rows)

    @property
    def block_rows(self) -> int:
        """Rows of a full batch of blocks."""
        return self.max_batch_size * (self.block_size or 1)

    @property
    def running_bytes(self) -> int:
        """Memory of a device beside weights and K/V."""
        return OVERHEAD


def static_schedule(
    cost: CostModel, survival: Sequence[float], widths: Sequence[int], max_batch_size: int
) -> list[Row]:
    """The width with the most tokens per second for every batch size; 0 drafted = off."""
    from dflash_serve.speculation.allocation import widths_by_batch  # numpy, which not every install has

    stretches = widths_by_batch(survival, cost, widths, max_batch_size)
    return [[first, last, width - 1] for first, last, width in stretches]


def every_width(widths: Sequence[int], max_batch_size: int) -> list[Row]:
    """A schedule in which every width occurs, because vLLM captures CUDA graphs of those that do, and of no others.

    The widest are for the smallest batches; our scheduler looks widths up elsewhere.
    """
    rows = [[batch, batch, width - 1] for batch, width in enumerate(sorted(widths, reverse=True), start=1)]
    rows[-1][1] = max_batch_size
    return rows


@cache
def _installed_compute() -> int | None:
    if not RELEASES.supports(RELEASES.installed()) or RELEASES.import_problem():
        return None
    with redirect_stdout(sys.stderr):  # where vLLM's log goes as soon as it is imported
        platform = import_module("vllm.platforms").current_platform
        capability = platform.get_device_capability() if platform.is_cuda() else None
    return capability.to_int() if capability else None

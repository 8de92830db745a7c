"""`SGLangSettings`: a deployment, its target and its drafter, and the settings of SGLang that follow from them.

SGLang 0.5.23 serves heads by `models/dflash.py` (plain, convolutions, DFlash2) and `models/dspark.py` (a Markov head of
any kind, both slot conventions). Neither knows a reduced vocabulary; DSPARK always builds a Markov head.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from dflash_serve.adapter.launch import EngineLaunch
from dflash_serve.checkpoint.config import Heads
from dflash_serve.common.settings import ENV_PREFIX
from dflash_serve.deployment.gpus import GIB, Gpu
from dflash_serve.errors import Problem, UserError

from .facts import FACTS
from .layouts import is_known_as_published

DFLASH, DSPARK = "DFLASH", "DSPARK"
"""SGLang's names of its algorithms. Where a width is asked for, our plug-in gives DFLASH another worker."""
WIDTH_VARIABLE = f"{ENV_PREFIX}SPECULATION__WIDTH"
"""The Deployment's own variable, by which the plug-in is told the width: `auto`, or a number."""
REPLAY = "enable-linear-replayssm-spec"  # SGLang's flag: one recurrent state for a request instead of one for a slot
AUTO = 0  # value of `asked_width` for an automatic width
ANY_WIDTH = ("qwen3", "nemotron_h")
"""Families whose recurrent layers (gated delta nets, Mamba2) keep a state for every slot, and so verify any width."""
RUNTIME_BYTES = 3 * GIB  # CUDA context, NCCL, workspaces
GRAPH_BYTES = 3 * GIB  # CUDA graphs of target and drafter, and activations of a prefill
WIDTH_BYTES = GIB  # attention workspace and CUDA graphs of another width than B
TRANSFER = "disaggregation-transfer-backend"  # SGLang's flag: the way of K/V from one half of a pair to the other
BACKUP = "disaggregation-decode-retraction-backup"  # SGLang's flag: the place of a retracted request's K/V
DRAFT_KERNELS = "speculative-draft-attention-backend"  # SGLang's flag
SINK_KERNELS, SINK_COMPUTE = "trtllm_mha", 90
"""Kernels of the published form of Nemotron 3.5's sinks, and the least compute capability that runs them."""
WITH_SINKS = ("fa3", "fa4", "triton", "trtllm_mha")  # its kernels that take attention sinks (srt/layers/attention)
KEEP_ON_DECODE = "disaggregation-decode-enable-radix-cache"  # SGLang's flag
OFFLOAD = "disaggregation-decode-enable-offload-kvcache"  # SGLang's flag
ALIKE = (
    *("page-size", TRANSFER, "attention-backend", "speculative-algorithm", "speculative-draft-model-path"),
    *("speculative-num-draft-tokens", "speculative-draft-kv-cache-dtype", DRAFT_KERNELS),
)
"""Arguments of the layout of target's and drafter's K/V; SGLang itself compares the page size and the target's format,
with the first request (disaggregation/common/conn.py)."""
COPIED = 0.2
"""Share of a decode half's K/V that SGLang copies, at least one request's (mem_cache/kv_cache_builder.py)."""
HOST_RESERVE = 10 * GIB
"""Host memory that SGLang leaves free beside that copy (mem_cache/pool_host/base.py)."""
OF_FREE_HOST = 0.8 * 0.95
"""Share of the other free host memory that the copy may take (mem_cache/hicache_auto_size.py)."""


def dialect_of(heads: Heads) -> str:
    """Dialect of the draft folder: DSPARK reads `markov_rank` at top level only, as DeepSpec writes it."""
    return "zlab" if heads.markov is None else "deepspec"


def head_problems(heads: Heads) -> Iterator[Problem]:
    """Heads that SGLang would refuse late, or silently leave out."""
    other = "use --backend torch"
    if heads.latent is not None:
        what = "latent attention (MLA) in a drafter, of which SGLang 0.5.23 has no class"
        yield Problem(what, "drafter.model", "use --backend vllm, or a drafter with grouped-query attention")
    if heads.draft_vocabulary is not None:
        what = "a reduced draft vocabulary: SGLang would skip d2t and lm_head and draft through the target's head"
        do = f"convert it (`dflash-serve convert --full-vocabulary --target ...`), or {other}"
        yield Problem(what, "drafter.model", do)
    if heads.slots == "anchor-first" and heads.markov is None:
        what = (
            "anchor-first slots without a Markov head: SGLang's DFLASH reads fill-in slots, its DSPARK needs the head"
        )
        do = f"convert it (`dflash-serve convert --to deepspec --markov-head zero`), or {other}"
        yield Problem(what, "drafter.model", do)
    if heads.markov is not None and heads.convolution is not None:
        yield Problem("convolutions beside a Markov head, which no checkpoint of SGLang's has", "drafter.model", other)


def draft_kernels(gpu: Gpu) -> str | None:
    """SGLang's name of the drafter's attention kernels, whose block is not causal; None = SGLang's own choice.

    FlashAttention 4 runs on SM100 and SM103, FlashAttention 3 up to SM90 (attention_registry.py).
    The target's are SGLang's choice, by model: Gemma 4 has none but `triton` on Hopper, Inkling none but `fa4`.
    """
    return "fa4" if gpu.is_sm100 else "fa3" if gpu.compute <= 90 else None


def narrow_widths(block_size: int) -> list[int]:
    """Widths of `auto` besides B: 1 (off) and powers of two, few enough for CUDA graphs of each."""
    return [width for width in (1, 2, 4, 8, 16, 32) if width < block_size]


def asked_width(environment: Mapping[str, str] = os.environ) -> int | None:
    """The width that was asked for, AUTO where it follows the policy; None = none was: SGLang's own whole blocks.

    Raises:
        UserError: neither a number nor `auto`.
    """
    text = environment.get(WIDTH_VARIABLE)
    if text is None:
        return None
    if text == "auto":
        return AUTO
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    what = f"{text!r} is neither a number of slots nor auto"
    raise UserError(what, where=WIDTH_VARIABLE, do="correct it; without speculation, leave --speculative-algorithm out")


class SGLangSettings(EngineLaunch):
    """A launch of SGLang, as far as its checks need it.

    SGLang's drafter has a K/V entry for every entry of the target (one index space): its pool grows with the target's
    (sglang#40665), so `memory` counts both per token.
    """

    name = "sglang"
    title = FACTS.title
    one_key = True
    loggers = ("sglang",)
    logging_variable = "SGLANG_LOGGING_CONFIG_PATH"
    alike = ALIKE

    @property
    def is_as_published(self) -> bool:
        return is_known_as_published(self.checkpoint)

    @property
    def draft_kernels(self) -> str | None:
        """SGLang's name of the drafter's attention kernels; None = SGLang's own choice.

        For the published form of Nemotron 3.5's sinks it takes no others than `trtllm_mha` (models/dflash.py).
        """
        if self.drafter is not None and self.drafter.attention_sinks and self.is_as_published:
            return SINK_KERNELS
        return draft_kernels(self.gpu) if self.gpu is not None else None

    @property
    def algorithm(self) -> str | None:
        """DSPARK with a Markov head, else DFLASH, which finds DFlash2 by its architecture; None without speculation."""
        if self.drafter is None:
            return None
        return DFLASH if self.drafter.markov is None else DSPARK

    @property
    def whole_blocks_with(self) -> str | None:
        """The part of the deployment with which SGLang verifies whole blocks only; None: any width can be verified."""
        if self.drafter is None:
            return None
        parts = {
            f"a {self.drafter.family} drafter": self.drafter.markov is not None,
            "a drafter of Nemotron 3.5": self.is_as_published,
            "one half of a disaggregated pair": self.is_half,
            "recurrent layers in the target": self.target.recurrent
            and not self.target.shape.model_type.startswith(ANY_WIDTH),
            "data-parallel attention": self.deployment.parallel.attention_data,
            **dict(self._arguments_of_whole_blocks()),
        }
        return next((part for part, is_there in parts.items() if is_there), None)

    def _arguments_of_whole_blocks(self) -> Iterator[tuple[str, bool]]:
        """The user's own arguments with which the plug-in would serve whole blocks, or nothing (`plugin.worker`)."""
        given = self.in_effect
        recurrent = self.target.recurrent
        sizes = {str(given[name]) for name in ("attn-cp-size", "attention-context-parallel-size") if name in given}
        yield "LoRA", "enable-lora" in given or "lora-paths" in given  # its CUDA graphs are made for one width
        yield "--enable-two-batch-overlap", "enable-two-batch-overlap" in given
        yield "--enable-pdmux", "enable-pdmux" in given
        yield "context-parallel attention", not sizes <= {"1"}
        yield f"--{REPLAY}", recurrent and REPLAY in given
        mamba = self.target.shape.model_type.startswith("nemotron_h")
        yield "--mamba-backend flashinfer", mamba and given.get("mamba-backend") == "flashinfer"
        yield "an NPU", str(given.get("device", "")).startswith("npu")

    @property
    def never_narrow(self) -> str | None:
        part = self.whole_blocks_with
        return None if part is None else f"whole blocks with {part}"

    @property
    def width(self) -> int | str | None:
        """Width that our worker is asked for; None = SGLang's own whole blocks, or no speculation."""
        asked = self.deployment.speculation.width
        whole = asked == self.block_size or self.whole_blocks_with is not None
        return None if self.drafter is None or whole else asked

    @property
    def narrow_widths(self) -> list[int]:
        """Widths below B at which our worker may verify."""
        if self.width is None or self.block_size is None:
            return []
        return [self.width] if isinstance(self.width, int) else narrow_widths(self.block_size)

    @property
    def has_host_copy(self) -> bool:
        """SGLang reserves host memory at start for the K/V of requests that it retracts.

        It does so on decode halves, but for these exceptions (`resolve_decode_retraction_backup` of
        mem_cache/kv_cache_builder.py).
        """
        given = self.in_effect
        preempts = "enable-priority-scheduling" in given and "disable-priority-preemption" not in given
        others = KEEP_ON_DECODE in given or OFFLOAD in given
        by_default = not (self.target.latent or self.target.recurrent or preempts or others)
        chosen = given.get(BACKUP, "host_pool" if by_default else "cpu_tensor")
        return self.deployment.role == "decode" and chosen == "host_pool"

    @property
    def host_copy(self) -> int | None:
        """Bytes of host memory for one device's copy, beside `HOST_RESERVE`; None = no copy, or no GPU is named."""
        memory = self.memory
        if memory is None or not self.has_host_copy or not memory.tokens:
            return None
        longest = self.deployment.limits.max_model_len or self.target.shape.max_position_embeddings or 0
        return round(max(COPIED, min(1.0, longest / memory.tokens)) * memory.pool / OF_FREE_HOST)

    @property
    def host_bytes(self) -> int | None:
        """The copies of all devices of one node, and what must stay free beside them."""
        parallel, count = self.deployment.parallel, self.deployment.hardware.count
        return None if self.host_copy is None else self.host_copy * (count // parallel.nodes) + HOST_RESERVE

    @property
    def running_bytes(self) -> int:
        """Memory of a device beside weights and K/V; every width other than B has graphs of its own."""
        return RUNTIME_BYTES + GRAPH_BYTES + len(self.narrow_widths) * WIDTH_BYTES

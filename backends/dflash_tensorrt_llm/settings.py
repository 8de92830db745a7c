"""`TensorRTLLMSettings`: a deployment and the settings that follow from the files of target and drafter.

The drafter's context arena surprised users with 80 GB (issue #16005). The worker holds K/V of every context token of
every request, densely: entries x layers x (max_seq_len + B) x 2 x K/V heads x head_dim, one entry more than the batch,
per device (`dflash.py` @00679c6 `_lazy_init_ctx_buffers`). It is allocated outside the K/V pool, so
`free_gpu_memory_fraction` does not bound it. With TRTLLM attention and 16-bit K/V, 1.4 has no such arena: the context
lies in the pages of the draft K/V manager, inside the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash_serve.adapter.arguments import EngineArgs
from dflash_serve.adapter.launch import EngineLaunch
from dflash_serve.checkpoint.config import DrafterConfig, Heads, context_bytes
from dflash_serve.checkpoint.quantization import Quantization
from dflash_serve.checkpoint.source import recorded_survival
from dflash_serve.deployment.gpus import GIB
from dflash_serve.deployment.variables import COST_TABLE, SURVIVAL, given_cost, given_survival

from .facts import FACTS
from .upstream import FA4_ATTENTION, FROM_1_4, NEWEST, TRTLLM_ATTENTION, Release

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel

ROWS = 8192  # TensorRT-LLM's default of max_num_tokens
OVERHEAD = 4 * GIB  # CUDA context, NCCL, workspaces; upstream's own estimate (test_dflash_config_budget.py @414ba69)
ACTIVATIONS = 4 * GIB  # left for activations and CUDA graphs
MOST_REQUESTS, UNKNOWN_GPU_REQUESTS = 256, 32
"""Requests at once where the deployment does not say how many; the second where it does not name its GPU either."""
ARENA_SHARE = 0.4
"""Share of the memory after the weights for the drafter's context of so many requests; K/V gets the remainder."""
PAGE = 32  # tokens a page of the paged arena (attention_backend TRTLLM or FA4)

Implementation = Literal["upstream", "dequantised context", "ours"]
"""The drafter that TensorRT-LLM runs: its own; a subclass of it that dequantises the K/V rows of a quantised one; or
ours, for properties that its own would get wrong."""


@dataclass(frozen=True, kw_only=True)
class TensorRTLLMSettings(EngineLaunch):
    """A launch of TensorRT-LLM, as far as its checks need it."""

    name = "tensorrt-llm"
    title = FACTS.title

    release: Release = NEWEST

    @property
    def quantization(self) -> Quantization | None:
        """The drafter's; None = not quantised."""
        return self.checkpoint.quantization if self.checkpoint else None

    @property
    def beyond_upstream(self) -> list[str]:
        """Properties of this drafter that TensorRT-LLM's own drafter would silently ignore, quantisation aside."""
        return beyond_built_in(self.drafter, self.release) if self.drafter else []

    @property
    def implementation(self) -> Implementation:
        """The fastest drafter that gets this one right."""
        if self.beyond_upstream:
            return "ours"
        return "dequantised context" if self.quantization else "upstream"

    @property
    def needs_plug_in(self) -> list[str]:
        """Properties that need our package; none = TensorRT-LLM's own drafter runs alone."""
        if self.implementation != "dequantised context":
            return self.beyond_upstream
        return ["quantised weights (its fused K/V product ignores their scales)"]

    @property
    def draft_dtype(self) -> Literal["float16", "bfloat16"]:
        """Number format of what is not quantised: the target's, whose embeddings it reads. Attention takes 16 bits."""
        return "float16" if self.target.dtype == "float16" else "bfloat16"

    @property
    def decoding_type(self) -> Literal["DFlash", "DSpark"]:
        """Upstream's method: DSpark has the Markov and confidence heads and anchor-first slots, DFlash all others."""
        return "DSpark" if self.drafter and is_dspark(self.drafter) else "DFlash"

    @property
    def drafts_itself(self) -> bool:
        """TensorRT-LLM drafts by another method, as the user's own arguments say."""
        return self.drafter is None and "speculative_config" in self.engine_args

    @property
    def speculative_args(self) -> EngineArgs:
        """The user's own keys of `speculative_config`."""
        section = self.engine_args.get("speculative_config")
        return section if isinstance(section, dict) else {}

    @property
    def users_schedule(self) -> dict[int, int] | None:
        """The user's own `draft_len_schedule`; None = the user gave none."""
        schedule = self.speculative_args.get("draft_len_schedule")
        if not isinstance(schedule, dict):
            return None
        return {int(size): length for size, length in schedule.items() if isinstance(length, int)}

    @property
    def recorded_survival(self) -> list[float] | None:
        """The drafter's survival as training measured it, where that is recorded."""
        return recorded_survival(self.checkpoint.folder) if self.checkpoint else None

    def draft_lengths(self) -> dict[int, int] | None:
        """`draft_len_schedule` for a width that follows cost; None = there is nothing to make one of, or no need.

        Raises:
            UserError: the cost table or the survival that was given is none.
        """
        if self.drafter is None or self.deployment.speculation.width != "auto" or self.users_schedule is not None:
            return None
        if self.drafter.words:  # schedules were read with plain drafters alone
            return None
        cost, survival = given_cost(), given_survival() or self.recorded_survival
        if cost is None or survival is None:
            return None
        return draft_lengths(cost, survival, self.block_size, self.max_batch_size or 1)

    @property
    def never_narrow(self) -> str | None:
        # A table gives the width by batch size: the user's, or one from measured costs.
        if self.drafter is None or self.users_schedule is not None or self.draft_lengths() is not None:
            return None
        return f"whole blocks; {self.way_to_follow_cost}"

    @property
    def way_to_follow_cost(self) -> str:
        """Advice for a `width: auto` that has no `draft_lengths`."""
        if self.drafter is not None and self.drafter.words:
            return "use --backend torch, where the width follows cost"
        wanted = COST_TABLE if self.recorded_survival is not None else f"{COST_TABLE} and {SURVIVAL}"
        return f"give {wanted}, from which widths by batch size follow"

    @property
    def recomputes_tails(self) -> bool:
        """`context_recompute_tail` exists: in DFlash's configuration, since 1.4."""
        return self.decoding_type == "DFlash" and self.release >= FROM_1_4

    @property
    def recompute_tail(self) -> int:
        """Tokens at the end of a reused prompt that pass the target again; a drafter of windows alone needs no more.

        0 = it is not known how many are enough, or the release has no such key.
        """
        asked = self.speculative_args.get("context_recompute_tail")
        if isinstance(asked, int) or self.drafter is None or not self.recomputes_tails:
            return asked if isinstance(asked, int) else 0
        windows = [kind.window for kind in self.drafter.layers]
        return 0 if None in windows else max(window for window in windows if window is not None)

    @property
    def block_size(self) -> int:
        """B that is served, the anchor counted."""
        assert self.drafter is not None
        speculation = self.deployment.speculation
        block = speculation.block_size or self.drafter.block_size
        return min(block, speculation.width) if isinstance(speculation.width, int) else block

    @property
    def attention_backend(self) -> str:
        """Kernels of the drafter's attention: trtllm-gen on Blackwell, FA4 on Hopper (#18553: +5.7 %), else VANILLA.

        trtllm-gen has no two-sided windows and not every head, and DSpark no FA4.
        """
        if self.drafter is None or self.implementation == "ours" or self.gpu is None:
            return "VANILLA"
        has_kernels = trtllm_gen_has(self.drafter) and not has_two_sided_windows(self.drafter)
        if self.gpu.is_sm100 and self.release >= TRTLLM_ATTENTION and has_kernels:
            return "TRTLLM"
        has_fa4 = self.decoding_type == "DFlash" and self.release >= FA4_ATTENTION
        return "FA4" if self.gpu.compute == 90 and has_fa4 else "VANILLA"

    @property
    def context_in_pool(self) -> bool:
        """The drafter's context lies in the K/V pool; a quantised pool lacks its type, and an arena stays."""
        sixteen_bits = self.deployment.kv_cache.dtype in ("auto", "bfloat16") and not self.target.quantized_kv
        return self.attention_backend == "TRTLLM" and sixteen_bits and self.release >= FROM_1_4

    @property
    def drafter_kv_heads(self) -> int:
        """The drafter's K/V heads on one device: its share, or one that neighbours repeat."""
        assert self.drafter is not None
        return max(1, self.drafter.num_key_value_heads // self.drafter_devices)

    @property
    def max_batch_size(self) -> int | None:
        """Requests at once; None = upstream's own 2048, which no drafter's context would leave room for.

        Unasked it is the largest power of two up to `MOST_REQUESTS` whose context takes at most `ARENA_SHARE` of what
        the weights leave.
        """
        asked = self.deployment.limits.max_batch_size
        if asked is not None or self.drafter is None:
            return MOST_REQUESTS if asked is None and self.drafts_itself else asked
        if self.memory is None:
            return UNKNOWN_GPU_REQUESTS
        if self.context_in_pool:
            return MOST_REQUESTS
        sizes = (MOST_REQUESTS >> halvings for halvings in range(MOST_REQUESTS.bit_length()))
        budget = ARENA_SHARE * self.memory.pool
        return next((size for size in sizes if self.arena_bytes(size, self.max_model_len) <= budget), 1)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer that are served."""
        return self.deployment.limits.max_model_len or self.target.shape.max_position_embeddings or ROWS

    @property
    def max_num_tokens(self) -> int:
        """Rows of a step; grown where a full batch of blocks needs more than upstream's default."""
        asked = self.deployment.limits.max_num_tokens
        return asked or max(ROWS, (self.max_batch_size or 1) * (self.block_size if self.drafter else 1))

    @property
    def running_bytes(self) -> int:
        """Memory of a device beside weights and K/V."""
        return OVERHEAD + ACTIVATIONS

    @property
    def context_token_bytes(self) -> int:
        """K and V of one context token in all drafter layers on one device, bf16."""
        assert self.drafter is not None
        return context_bytes(self.drafter, self.drafter_kv_heads)

    def arena_bytes(self, max_batch_size: int, max_model_len: int) -> int:
        """The context arena on one device, dense or in pages, bf16; none where the context lies in the K/V pool."""
        assert self.drafter is not None
        if self.context_in_pool:
            return 0
        capacity = min(max_model_len, self.drafter.max_position_embeddings) + self.block_size
        if self.attention_backend != "VANILLA":
            capacity = -(-capacity // PAGE) * PAGE
        return (max_batch_size + 1) * capacity * self.context_token_bytes

    @property
    def pool_fraction(self) -> float | None:
        """`free_gpu_memory_fraction` that leaves room for the arena: a share of what is free after the weights."""
        memory = self.memory
        if memory is None or self.drafter is None:
            return None
        arena = self.arena_bytes(self.max_batch_size or 1, self.max_model_len)
        left, free = memory.pool - arena, memory.pool + ACTIVATIONS
        if self.attention_backend != "TRTLLM" and self.release >= FROM_1_4:
            free -= arena  # it is made before upstream measures what is free (#19410), and stays
        return max(0.05, min(0.9, int(100 * left / free) / 100)) if free > 0 else 0.05


def beyond_built_in(config: DrafterConfig, release: Release) -> list[str]:
    """Properties of a drafter that a release's `DFlashForCausalLM` (modeling_dflash.py) silently ignores."""
    windowed = {kind for kind in config.layers if kind.window is not None}
    understood = release >= FROM_1_4 and len(windowed) == 1
    properties = {
        "a mask embedding of its own": config.has_mask_embedding,
        "an embedding scale": config.embedding_scale != 1.0,
        "an output multiplier": config.output_multiplier != 1.0,
        "a soft-cap of the logits": config.final_logit_softcap is not None,
        "windows that are not causal in the block": has_two_sided_windows(config) and not understood,
        "full-attention layers that are causal": any(kind.causal and kind.window is None for kind in config.layers),
    }
    return [what for what, present in properties.items() if present]


def is_dspark(heads: Heads) -> bool:
    """TensorRT-LLM serves it as DSpark; its DFlash refuses such heads (`declares_dspark_heads`, modeling_dflash.py)."""
    return heads.markov is not None or heads.confidence is not None or heads.slots == "anchor-first"


def trtllm_gen_has(config: DrafterConfig) -> bool:
    """trtllm-gen has kernels for heads of this size, and for so many to each K/V head."""
    return config.head_dim not in (72, 80, 96) and config.num_attention_heads <= 32 * config.num_key_value_heads


def has_two_sided_windows(config: DrafterConfig) -> bool:
    """Some windowed layers see later slots of the block, too."""
    return any(kind.window is not None and not kind.causal for kind in config.layers)


def draft_lengths(cost: CostModel, survival: Sequence[float], block_size: int, max_batch_size: int) -> dict[int, int]:
    """`draft_len_schedule`: largest batch size of each stretch -> drafted tokens that pay there, the first the most.

    Upstream reads a key as "up to this batch size" (PR #10860). Above the largest key, and at 0, it drafts nothing; the
    drafter then never gets the features of those tokens, and accepts little until such a request ends, without an
    error (PR #16888). So ours reaches up to the largest batch and always drafts one token.
    """
    from dflash_serve.speculation.allocation import widths_by_batch  # numpy, which not every install has

    ((_, _, most),) = widths_by_batch(survival, cost, range(2, block_size + 1), 1)
    stretches = widths_by_batch(survival, cost, range(2, most + 1), max_batch_size)
    return {last: width - 1 for _, last, width in stretches}


def starving_from(lengths: Mapping[int, int], max_batch_size: int) -> int | None:
    """The least batch size at which a schedule drafts nothing; None = there is none."""
    sizes = sorted(lengths)
    ends = [0, *sizes]
    zero = (ends[place] + 1 for place, size in enumerate(sizes) if lengths[size] == 0)
    return next(zero, sizes[-1] + 1 if sizes[-1] < max_batch_size else None)

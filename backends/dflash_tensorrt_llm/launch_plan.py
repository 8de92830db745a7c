"""LaunchPlan: what a Deployment means for TensorRT-LLM, worked out from the config.json files of target and drafter.

The drafter's context arena surprised users with 80 GB (issue #16005). The worker holds K/V of every context token of
every request, densely: entries x layers x (max_seq_len + B) x 2 x K/V heads x head_dim, one entry more than the batch,
per device (`dflash.py` @00679c6 `_lazy_init_ctx_buffers`). It is allocated outside the K/V pool, so
`free_gpu_memory_fraction` does not bound it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_serve.checkpoint.config import DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.quantization import Quantization
from dflash_serve.checkpoint.reader import read_drafter
from dflash_serve.checkpoint.source import drafter_source, local_folder, recorded_survival
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, target_configuration
from dflash_serve.cost_table import given_cost, given_survival
from dflash_serve.deployment import GIB, GPUS, Deployment, Gpu, Model
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.engine_args import EngineArgs

from .schedule import draft_lengths
from .upstream import Release

ROWS = 8192
"""TensorRT-LLM's default of max_num_tokens."""
OVERHEAD = 4 * GIB
"""CUDA context, NCCL, workspaces; upstream's own estimate (test_dflash_config_budget.py @414ba69)."""
ACTIVATIONS = 4 * GIB
"""Left for activations and CUDA graphs."""
MOST_REQUESTS, UNKNOWN_GPU_REQUESTS = 256, 32
"""Requests at once where the deployment does not say how many; the second where it does not name its GPU either."""
ARENA_SHARE = 0.4
"""Of what the weights leave, for the context of the drafter of so many requests; the rest is K/V."""
PAGE = 32
"""Tokens a page of the paged arena (attention_backend TRTLLM)."""


@dataclass(frozen=True)
class LaunchPlan:
    """A Deployment with everything that its configuration, checks and command line follow from."""

    deployment: Deployment
    release: Release
    gpu: Gpu | None
    target: TargetLayout
    drafter: DrafterConfig | None
    """None = it does not speculate."""
    quantization: Quantization | None
    """The drafter's."""
    needs_plug_in: tuple[str, ...]
    """What of this drafter TensorRT-LLM's own drafter would get wrong in silence; nothing = it runs, and not ours."""
    recorded_survival: tuple[float, ...] | None = None
    """What the drafter had when it was trained, where that is told."""

    @property
    def engine_args(self) -> EngineArgs:
        """The user's own options of trtllm-serve and keys of config.yaml."""
        return self.deployment.engine_args.get("tensorrt-llm", {})

    @property
    def users_schedule(self) -> dict[int, int] | None:
        """The user's own `draft_len_schedule`; None = the user gave none."""
        speculative = self.engine_args.get("speculative_config")
        given = speculative.get("draft_len_schedule") if isinstance(speculative, dict) else None
        if not isinstance(given, dict):
            return None
        return {int(size): length for size, length in given.items() if isinstance(length, int)}

    def draft_lengths(self) -> dict[int, int] | None:
        """`draft_len_schedule` for a width that follows cost; None = there is nothing to make one of, or no need.

        Raises:
            UserError: the cost table or the survival that was given is none.
        """
        if self.drafter is None or self.deployment.speculation.width != "auto" or self.users_schedule is not None:
            return None
        cost, survival = given_cost(), given_survival() or self.recorded_survival
        if cost is None or survival is None or not self.release.takes_schedule:
            return None
        return draft_lengths(cost, survival, self.block_size, self.max_batch_size or 1)

    @property
    def block_size(self) -> int:
        """B that is served, the anchor counted."""
        assert self.drafter is not None
        speculation = self.deployment.speculation
        block = speculation.block_size or self.drafter.block_size
        return min(block, speculation.width) if isinstance(speculation.width, int) else block

    @property
    def attention_backend(self) -> str:
        """VANILLA, which our plug-in needs, but for TensorRT-LLM's own drafter where trtllm-gen's kernels run."""
        blackwell = self.gpu is not None and self.gpu.is_blackwell
        return "TRTLLM" if blackwell and not self.needs_plug_in else "VANILLA"

    @property
    def drafter_devices(self) -> int:
        """Devices that share the drafter: attention data parallelism gives each a whole one."""
        parallel = self.deployment.parallel
        return 1 if parallel.attention_data else parallel.tensor

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
            return asked
        if self.gpu is None:
            return UNKNOWN_GPU_REQUESTS
        budget = ARENA_SHARE * (self.gpu.memory - self.weight_bytes - OVERHEAD - ACTIVATIONS)
        sizes = (MOST_REQUESTS >> halvings for halvings in range(MOST_REQUESTS.bit_length()))
        return next((size for size in sizes if self.arena_bytes(size, self.max_model_len) <= budget), 1)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer that are served."""
        asked = self.deployment.limits.max_model_len
        return asked or self.target.shape.max_position_embeddings or ROWS

    @property
    def max_num_tokens(self) -> int:
        """Rows of a step; grown where a full batch of blocks needs more than upstream's default."""
        asked = self.deployment.limits.max_num_tokens
        block = self.block_size if self.drafter else 1
        return asked or max(ROWS, (self.max_batch_size or 1) * block)

    @property
    def weight_bytes(self) -> int:
        """Target and drafter on one device."""
        target = self.target.weight_bytes // self.deployment.parallel.tensor
        return target + (weight_bytes(self.drafter) // self.drafter_devices if self.drafter else 0)

    @property
    def context_token_bytes(self) -> int:
        """K and V of one context token in all drafter layers on one device, bf16."""
        assert self.drafter is not None
        return context_bytes(self.drafter, self.drafter_kv_heads)

    def arena_bytes(self, max_batch_size: int, max_model_len: int) -> int:
        """The context arena on one device, dense or in pages, bf16."""
        assert self.drafter is not None
        capacity = min(max_model_len, self.drafter.max_position_embeddings) + self.block_size
        if self.attention_backend == "TRTLLM":
            capacity = -(-capacity // PAGE) * PAGE
        return (max_batch_size + 1) * capacity * self.context_token_bytes

    def pool_fraction(self, gpu: Gpu) -> float:
        """`free_gpu_memory_fraction` that leaves room for the arena: a share of what is free after the weights."""
        arena = self.arena_bytes(self.max_batch_size or 1, self.max_model_len)
        free = gpu.memory - self.weight_bytes - OVERHEAD
        return max(0.05, min(0.9, int(100 * (free - ACTIVATIONS - arena) / free) / 100)) if free > 0 else 0.05


def make_launch_plan(deployment: Deployment, release: Release) -> LaunchPlan:
    """The plan of a deployment; of hub models, only the configuration is fetched.

    Raises:
        UserError: target or drafter cannot be found or read.
    """
    target = read_target_layout(target_configuration(deployment.target), deployment.target)
    config, quantization, survival = None, None, None
    if deployment.drafter is not None and uses_drafter(deployment):
        folder = drafter_configuration(deployment.drafter)
        config, quantization = read_drafter(folder)
        survival = recorded_survival(folder)
    return LaunchPlan(
        deployment=deployment,
        release=release,
        gpu=GPUS.get(deployment.hardware.gpu or ""),
        target=target,
        drafter=config,
        quantization=quantization,
        needs_plug_in=tuple(beyond_built_in(config, quantization)) if config else (),
        recorded_survival=None if survival is None else tuple(survival),
    )


def drafter_configuration(model: Model) -> Path:
    """A folder with the drafter's configuration, fetched where it is a hub id."""
    return local_folder(drafter_source(model.model), model.revision, files=["*.json"])


def beyond_built_in(config: DrafterConfig, quantization: Quantization | None) -> list[str]:
    """What this drafter needs and `DFlashForCausalLM` (modeling_dflash.py @009d8fa) ignores without an error."""
    two_sided = any(kind.window is not None and not kind.causal for kind in config.layers)
    found = {
        "quantised weights (its fused K/V product ignores their scales)": quantization is not None,
        "a mask embedding of its own": config.has_mask_embedding,
        "an embedding scale": config.embedding_scale != 1.0,
        "an output multiplier": config.output_multiplier != 1.0,
        "a soft-cap of the logits": config.final_logit_softcap is not None,
        "windows that are not causal in the block": two_sided,
        "full-attention layers that are causal": any(kind.causal and kind.window is None for kind in config.layers),
        "feature layers out of order (it sorts them)": list(config.target_layer_ids) != sorted(config.target_layer_ids),
    }
    return [what for what, present in found.items() if present]

"""TensorRT-LLM's releases, and a mirror of the part of its configuration that we write.

Names, defaults and rules of the configuration: `tensorrt_llm/llmapi/llm_args.py` @0004396 (1.3) and the reference pages
of 1.3.0rc27 and 1.4.0rc1. Upstream's models forbid unknown keys, and so do these. Where the release is installed, its
own models are asked instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from dflash_serve.common.settings import Frozen, describe
from dflash_serve.errors import UserError

NEUTRAL = "dflash_serve.json"
"""Our description of the drafter, beside its config.json: z-lab's dialect cannot say everything our plug-in reads."""
FINAL = 10_000  # comes after all candidates
ANSWER = "dflash-serve: verdict "  # begins the line of a process that asked the installed LlmArgs


@dataclass(frozen=True, order=True)
class Release:
    """A release by number; `candidate` is the n of rcn, FINAL for a final one."""

    major: int
    minor: int
    candidate: int = FINAL

    @classmethod
    def parse(cls, text: str) -> Release:
        """Reads a version such as 1.4, 1.3.0rc27 or 1.4.0rc1.post1.

        Raises:
            UserError: the text is no version.
        """
        found = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(?:rc(\d+))?", text)
        if found is None:
            raise UserError(f"{text!r} is no version", where="TensorRT-LLM", do="give one such as 1.4.0rc1")
        major, minor, candidate = found.groups()
        return cls(int(major), int(minor), int(candidate) if candidate else FINAL)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}" + ("" if self.candidate == FINAL else f".0rc{self.candidate}")


# The first release for which there is evidence: a reference page, or a merge while trunk bore that number (trunk became
# rc24 on 30 July 2026, #17070, and rc25 on 10 August, #17481). Too late costs speed, too early a refused YAML.
OLDEST = Release(1, 3, 22)  # the first in which DFlash follows draft_len_schedule (#12262)
TRTLLM_ATTENTION = Release(1, 3, 25)  # #16914, which brought the key `attention_backend` itself
FA4_ATTENTION = Release(1, 3, 27)  # #18553; reference page of 1.3.0rc27
# Drafters from outside, and DSpark drafters in folders of their own (#18043, #18284); with TRTLLM attention the context
# in the K/V pool (#18343); `use_swa` (modeling_dflash.py @7c7504c); the keys of `NEW_IN_1_4` (page of 1.4.0rc1).
FROM_1_4 = Release(1, 4, 0)
# #18155: #19159 of 14 September 2026 follows it, and a key of the later #19466 is on the page of 1.4.0rc1.
DFLASH2 = Release(1, 4, 1)
NEWEST = Release(1, 4)  # the newest whose sources were read
NEW_IN_1_4 = ("speculative_config.context_recompute_tail", "speculative_config.skip_ctx_buffer_budget_check")


def installed_release() -> Release:
    """The installed package's release; where there is none, the newest we know (configuration for another machine)."""
    try:
        return Release.parse(version("tensorrt_llm"))
    except PackageNotFoundError:
        return NEWEST


def installed_verdict(release: Release, fields: Mapping[str, object]) -> str | None:
    """Answer of the installed LlmArgs to `fields`: "" = accepted, else its reason for refusing them.

    None = it was not asked: another release is installed, or none. A process of its own asks it, because its import
    starts MPI.

    Raises:
        UserError: it cannot be imported here.
    """
    try:
        if Release.parse(version("tensorrt_llm")) != release:
            return None
    except PackageNotFoundError:
        return None
    command = [sys.executable, "-c", f"from {__name__} import answer; answer()"]
    done = subprocess.run(command, input=json.dumps(fields), capture_output=True, text=True, check=False)  # noqa: S603
    found = [line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not found:
        why = ([line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"])[-1]
        do = "install a build of it for this environment's PyTorch and CUDA"
        what = f"TensorRT-LLM {release} is installed and cannot be imported here ({why})"
        raise UserError(what, where="tensorrt_llm", do=do)
    return str(json.loads(found[-1]))


def answer() -> None:
    """Prints the installed LlmArgs' verdict on the JSON on stdin, in the process that `installed_verdict` starts."""
    upstream = import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
    try:
        upstream.model_validate(json.load(sys.stdin))
    except ValidationError as error:
        print(ANSWER + json.dumps(describe(error)))
    except (ValueError, AssertionError) as error:
        print(ANSWER + json.dumps(f"{error}"))
    else:
        print(ANSWER + json.dumps(""))


WITHOUT_DRAFTER = {
    *("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "mistral", "ministral3", "qwen2", "qwen2_moe"),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
}
"""Language models (model_type) whose class upstream is a `DecoderModelForCausalLM`: drafters and their workers are made
by `SpecDecOneEngineForCausalLM` alone (docs/faults.md). Others were not read, and are not refused."""


class BlockDecodingConfig(Frozen):
    """Keys that both kinds of `speculative_config` have. `max_draft_len` is K = B - 1: the anchor does not count."""

    decoding_type: str
    max_draft_len: PositiveInt
    speculative_model: str
    mask_token_id: NonNegativeInt | None = None
    target_layer_ids: tuple[NonNegativeInt, ...] | None = None
    attention_backend: str = "VANILLA"
    acceptance_rate_window_size: NonNegativeInt | None = None
    acceptance_rate_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    use_rejection_sampling: bool = False
    enable_penalty: bool = False


class DSparkDecodingConfig(BlockDecodingConfig):
    """`speculative_config` with decoding_type DSpark.

    Upstream compares `block_size`, or else the drafter's own, with `max_draft_len` (llm_args.py @0004396). Its worker
    was never read with a schedule of draft lengths, so the key is left out here.
    """

    decoding_type: Literal["DSpark"] = "DSpark"
    attention_backend: Literal["AUTO", "VANILLA", "TRTLLM", "CUTEDSL"] = "AUTO"
    block_size: PositiveInt

    @model_validator(mode="after")
    def _drafts_whole_blocks(self) -> DSparkDecodingConfig:
        if self.block_size != self.max_draft_len:
            raise ValueError(f"block_size must be max_draft_len {self.max_draft_len}")
        return self


class DFlashDecodingConfig(BlockDecodingConfig):
    """`speculative_config` with decoding_type DFlash; upstream finds DFlash2 by the drafter's own config.json."""

    decoding_type: Literal["DFlash"] = "DFlash"
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = "VANILLA"
    max_concurrency: PositiveInt | None = None
    draft_len_schedule: dict[PositiveInt, NonNegativeInt] | None = None
    context_recompute_tail: Annotated[int, Field(ge=-1)] | None = None  # prompt tokens that a prefix hit computes again
    skip_ctx_buffer_budget_check: bool | None = None

    @model_validator(mode="after")
    def _schedule_is_sound(self) -> DFlashDecodingConfig:
        schedule = self.draft_len_schedule
        if schedule is None:
            return self
        if self.max_concurrency is not None:
            raise ValueError("max_concurrency and draft_len_schedule exclude each other")
        if not schedule:
            raise ValueError("draft_len_schedule is empty")
        if schedule[min(schedule)] != self.max_draft_len:
            raise ValueError(f"draft_len_schedule must begin with max_draft_len {self.max_draft_len}")
        if max(schedule.values()) > self.max_draft_len:
            raise ValueError(f"draft_len_schedule goes beyond max_draft_len {self.max_draft_len}")
        return self


class KvCacheConfig(Frozen):
    """`kv_cache_config`: the target's K/V pool."""

    enable_block_reuse: bool = True
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    dtype: Literal["auto", "fp8", "nvfp4"] = "auto"  # any other dies as the model is loaded
    tokens_per_block: PositiveInt = 32
    max_tokens: PositiveInt | None = None


class CudaGraphConfig(Frozen):
    """`cuda_graph_config`: graphs of decoding batches of these sizes, or of a spread of sizes up to the largest."""

    enable_padding: bool = False
    max_batch_size: NonNegativeInt = 0
    batch_sizes: tuple[PositiveInt, ...] | None = None


class LlmArgs(Frozen):
    """The root of `config.yaml` (upstream: TorchLlmArgs without `model`, which is on the command line)."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    moe_expert_parallel_size: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    enable_attention_dp: bool = False
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    max_batch_size: PositiveInt = 2048
    max_num_tokens: PositiveInt = 8192
    max_seq_len: PositiveInt | None = None
    max_beam_width: PositiveInt = 1
    trust_remote_code: bool = False
    stream_interval: PositiveInt = 1
    num_postprocess_workers: NonNegativeInt = 0
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    enable_iter_perf_stats: bool = False
    return_perf_metrics: bool = False
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    speculative_config: (
        Annotated[DFlashDecodingConfig | DSparkDecodingConfig, Field(discriminator="decoding_type")] | None
    ) = None

    @model_validator(mode="after")
    def _speculates_soundly(self) -> LlmArgs:
        if self.speculative_config is None:
            return self
        if self.max_beam_width > 1:
            raise ValueError(f"{self.speculative_config.decoding_type} does not run with beam search")
        if self.speculative_config.use_rejection_sampling and self.guided_decoding_backend is not None:
            raise ValueError("use_rejection_sampling and guided decoding exclude each other")
        return self

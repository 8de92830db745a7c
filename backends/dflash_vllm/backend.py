"""vLLM as a backend: a plan's command, choices and notes. vLLM's own server serves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from dflash_serve.adapter.launch import DRAFT, LOGGING, SECRETS, DraftForm, ServerAdapter
from dflash_serve.adapter.protocol import Choice, Command
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.errors import Problem

from .checks import captures, problems
from .drafter_rules import UNTRIED, dialect_of, head_problems, method_of
from .engine_arguments import PARSER_FLAGS, PARSERS, argument_table
from .facts import FACTS, GUESSED_COSTS, REAL_OFF, RELEASES
from .launch_plan import VLLMPlan, every_width

SCHEDULER = "--scheduler-cls"
SCHEDULERS = "dflash_vllm.plugin.scheduler"  # the module of our schedulers, whose widths follow the load
KEYS_MIDDLEWARE = "dflash_vllm.plugin.keys.EveryRoute"  # vLLM's own check of keys covers a part of its routes
Flag = tuple[str, ...]  # `--name` and its value, or `--name` alone


def arguments(plan: VLLMPlan, folder: Path) -> list[str]:
    """The command line without host and port, the target first; the user's own arguments come last."""
    parts = (
        _models(plan),
        _serving(plan, folder),
        _precision(plan),
        _parallel(plan),
        _limits(plan),
        _speculation(plan, folder),
    )
    ours = [word for part in parts for flag in part for word in flag]
    return [plan.deployment.target.model, *ours, *argument_table(plan).words(plan.engine_args)]


def _models(plan: VLLMPlan) -> Iterator[Flag]:
    if plan.deployment.target.revision is not None:
        yield "--revision", plan.deployment.target.revision
    # Otherwise generation_config.json sets sampling parameters that no request asked for.
    yield "--generation-config", "vllm"


def _serving(plan: VLLMPlan, folder: Path) -> Iterator[Flag]:
    # Keys go into a file: every user of the machine can read a command line.
    serving = plan.deployment.serving
    if serving.served_model_name is not None:
        yield "--served-model-name", serving.served_model_name
    for key, _, name in PARSERS.of(serving):
        if key == "tool_call_parser":
            yield ("--enable-auto-tool-choice",)
        yield f"--{PARSER_FLAGS[key]}", name
    if serving.api_key_file is not None:
        yield "--config", str(folder / SECRETS)
        yield "--middleware", KEYS_MIDDLEWARE
    if serving.otlp_traces_endpoint is not None:
        yield "--otlp-traces-endpoint", serving.otlp_traces_endpoint
    if serving.log_format == "json":
        yield "--log-config-file", str(folder / LOGGING)  # uvicorn's; vLLM's own is a variable


def _precision(plan: VLLMPlan) -> Iterator[Flag]:
    yield "--dtype", plan.dtype
    asked = plan.deployment.target.quantization
    if asked != "none" and plan.target.native_quantization is None:
        yield "--quantization", asked  # a quantised checkpoint says so itself
    if plan.on_cpu and "enforce-eager" not in plan.given:
        yield ("--enforce-eager",)  # compiling for a CPU takes minutes at every start
    if plan.deployment.kv_cache.dtype != "auto":
        yield "--kv-cache-dtype", plan.deployment.kv_cache.dtype


def _parallel(plan: VLLMPlan) -> Iterator[Flag]:
    yield "--tensor-parallel-size", str(plan.deployment.parallel.tensor)
    if plan.deployment.parallel.pipeline > 1:
        yield "--pipeline-parallel-size", str(plan.deployment.parallel.pipeline)
    if plan.deployment.parallel.expert > 1:
        yield ("--enable-expert-parallel",)


def _limits(plan: VLLMPlan) -> Iterator[Flag]:
    limits, cache = plan.deployment.limits, plan.deployment.kv_cache
    if limits.max_batch_size is not None or plan.block_size is not None:
        yield "--max-num-seqs", str(plan.max_batch_size)
    yield "--max-num-queued-reqs", str(limits.max_queued_requests)
    if limits.max_model_len is not None:
        yield "--max-model-len", str(limits.max_model_len)
    if plan.block_size is not None:
        # Every request's block takes K slots more of the same buffer when it is drafted.
        yield "--max-num-batched-tokens", str(plan.rows + plan.max_batch_size * (plan.block_size - 1))
        yield "--max-num-scheduled-tokens", str(plan.rows)
    elif limits.max_num_tokens is not None:
        yield "--max-num-batched-tokens", str(limits.max_num_tokens)
    if cache.block_reuse is False:
        yield ("--no-enable-prefix-caching",)
    if cache.memory_fraction is not None and plan.memory is not None:
        yield "--gpu-memory-utilization", str(plan.memory.fraction(cache.memory_fraction))


def _speculation(plan: VLLMPlan, folder: Path) -> Iterator[Flag]:
    if plan.block_size is None:
        return
    yield "--speculative-config", json.dumps(speculative_config(plan, folder / DRAFT))
    if plan.has_our_scheduler:
        scheduler = "WidthScheduler" if plan.on_cpu else "AsyncWidthScheduler"
        yield SCHEDULER, f"{SCHEDULERS}.{scheduler}"
    if plan.graph_sizes is not None:
        yield "--cudagraph-capture-sizes", *map(str, plan.graph_sizes)


def speculative_config(plan: VLLMPlan, draft: Path) -> dict[str, object]:
    """vLLM's `SpeculativeConfig` (config/speculative.py): greedy drafts, and the acceptance test that is exact."""
    assert plan.block_size is not None
    assert plan.drafter is not None
    method = method_of(plan.drafter)
    config: dict[str, object] = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": plan.block_size - 1,
        "draft_tensor_parallel_size": plan.deployment.parallel.tensor,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    if method == "dflash":
        # K/V of a context token are of that token alone, where EAGLE's are of the next one, too: vLLM would leave the
        # last block that it has of a prompt unused. DSpark's was not tried.
        config["disable_eagle_block_drop"] = True
    if plan.untrimmed is None:
        config["enable_adaptive_verification"] = True
    if plan.widths != (plan.block_size,):
        # Graphs of trimmed blocks are of any width; further rows would only add drafter graphs that are never used.
        captured = plan.widths if plan.untrimmed else plan.widths[-1:]
        schedule = plan.schedule() or every_width(captured, plan.max_batch_size)
        config["num_speculative_tokens_per_batch_size"] = schedule
    if not plan.on_cpu:
        # Otherwise a drafter takes over the target's, which may be FP8.
        config["kv_cache_dtype"] = "bfloat16"
    return config


LAUNCHER = "vllm.entrypoints.cli.main"
"""The module behind the command `vllm`; this Python runs it, so that it is the vLLM that was checked."""


class VLLMBackend(ServerAdapter[VLLMPlan]):
    """Checks and command line for vLLM 0.32-0.33. Needs neither a GPU nor vLLM until the command is run."""

    name = "vllm"
    facts = FACTS
    releases = str(RELEASES)
    untried = UNTRIED
    drafting_arguments = ("speculative_config", "spec_method")
    plan = VLLMPlan
    loggers = ("vllm", "uvicorn", "uvicorn.access", "uvicorn.error")
    logging_variable = "VLLM_LOGGING_CONFIG_PATH"

    def problems(self, plan: VLLMPlan) -> list[Problem]:
        """Problems of a plan, in the order in which a user would fix them."""
        return problems(plan)

    def head_problems(self, heads: Heads) -> list[Problem]:
        """Reasons why the engine does not serve such a drafter."""
        return head_problems(heads)

    def draft_form(self, drafter: DrafterConfig, target: str) -> DraftForm:
        """vLLM reads every key, and the target's name in speculators' dialect."""
        dialect = dialect_of(drafter)
        return DraftForm(dialect, "z-lab's dialect" if dialect == "zlab" else f"the dialect {dialect}", target)

    def launch(self, plan: VLLMPlan, folder: Path, host: str, port: int) -> Command:
        """The command line for a prepared folder."""
        argv = [sys.executable, "-m", LAUNCHER, "serve", *arguments(plan, folder)]
        env = {GUESSED_COSTS: plan.guessed_costs} if plan.has_our_scheduler else {}
        return Command((*argv, "--host", host, "--port", str(port)), {**env, **self.shared_environment(plan, folder)})

    def choices(self, plan: VLLMPlan) -> Iterator[Choice]:
        """Settings that the deployment leaves open.

        Raises:
            UserError: the cost table or the survival that was given is none.
        """
        deployment = plan.deployment
        if deployment.limits.max_batch_size is None:
            yield _max_batch_size(plan)
        if deployment.limits.max_model_len is None and plan.target.shape.max_position_embeddings is not None:
            longest = plan.target.shape.max_position_embeddings
            yield Choice("limits.max_model_len", f"{longest}", "the target's positions")
        if plan.drafter is not None:
            yield from _speculation_choices(plan)
        if deployment.hardware.gpu is None:
            yield Choice("hardware.gpu", "not named", "memory is not checked")
        if deployment.hardware.dtype == "auto":
            why = "what losslessness is exact in" if plan.on_cpu else "what drafters are published in"
            yield Choice("hardware.dtype", plan.dtype, why)

    def notes(self, plan: VLLMPlan) -> Iterator[str]:
        """Limits that no key of the deployment mentions."""
        if plan.drafter is None:
            return
        if plan.verifies_whole_blocks:
            family = plan.drafter.family
            yield f"{family} on vLLM was read, not run: compare it with the target by `dflash-serve verify`"
        if captures(plan) is None:
            target = plan.target.shape.model_type
            yield f"not checked: whether vLLM's model for {target!r} hands out hidden states, which a drafter needs"
        if plan.untrimmed is None:
            yield "/metrics counts drafted tokens that vLLM did not verify as rejected; `doctor` needs a fixed width"
        yield "requests with min_p or logit_bias are answered by HTTP 400: vLLM has neither with speculation"
        width = plan.deployment.speculation.width
        if not plan.v1_runner and isinstance(width, int) and width < (plan.block_size or 0):
            yield f"below a whole block vLLM drafts without CUDA graphs; speculation.block_size: {width} has them"
        release = RELEASES.numbers(RELEASES.installed())
        if 1 in plan.widths and not plan.on_cpu and (release is None or release < REAL_OFF):
            yield "before vLLM 0.33 steps without speculation still pay for a draft: use 0.33"


def _max_batch_size(plan: VLLMPlan) -> Choice:
    if plan.drafter is not None:
        why = "each has a whole block of rows in a step; vLLM's own number on large GPUs is 1024"
        return Choice("limits.max_batch_size", f"{plan.max_batch_size}", why)
    return Choice("limits.max_batch_size", "vLLM's choice", "by the GPU's memory; vLLM logs it")


def _speculation_choices(plan: VLLMPlan) -> Iterator[Choice]:
    limits, speculation = plan.deployment.limits, plan.deployment.speculation
    if limits.max_num_tokens is None:
        own = f"vLLM's own number on {plan.gpu.name if plan.gpu else 'h100'}"
        why = own if plan.rows > plan.block_rows else "a full batch of blocks"
        yield Choice("limits.max_num_tokens", f"{plan.rows}", why)
    if speculation.block_size is None:
        yield Choice("speculation.block_size", f"{plan.block_size}", "the drafter's own")
    whole = plan.verifies_whole_blocks and plan.untrimmed is not None
    width = plan.block_size if whole else speculation.width
    yield Choice("speculation.width", str(width), _width(plan))


def _width(plan: VLLMPlan) -> str:
    """The part that chooses the width, and the reason."""
    if plan.widths != (plan.block_size,) and plan.schedule() is not None:
        return "a schedule computed from the costs and the survival that were given"
    trims = f"vLLM drafts blocks of {plan.block_size} slots and verifies those slots that pay (adaptive verification)"
    if plan.has_our_scheduler and plan.untrimmed is None:
        return f"{trims}; our scheduler inside vLLM decides at every step whether to draft, which vLLM cannot"
    if plan.has_our_scheduler:
        return f"our scheduler inside vLLM chooses {', '.join(map(str, plan.widths))} at every step: {plan.untrimmed}"
    if plan.verifies_whole_blocks and plan.drafter is not None:
        kept = f"vLLM's own {plan.drafter.family}: whole blocks, the width never changes: {plan.untrimmed}"
        return trims if plan.untrimmed is None else kept
    return "whole blocks" if plan.widths == (plan.block_size,) else "one width in every step"


backend = VLLMBackend()

"""`VLLMLaunch`: command, choices and notes of a launch of vLLM's own server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from dflash_serve.adapter.launch import DRAFT, LOGGING, SECRETS, DraftForm
from dflash_serve.adapter.protocol import Choice, Command
from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.deployment.gpus import GIB
from dflash_serve.errors import Problem

from .checks import NIXL_HOST, captures, problems, side_channel_problems
from .drafter_rules import dialect_of, method_of
from .engine_arguments import PARSER_FLAGS, PARSERS, argument_table
from .facts import GUESSED_COSTS, REAL_OFF, RELEASES
from .kv_groups import groupings
from .settings import VLLMSettings, every_width

SCHEDULER = "--scheduler-cls"
SCHEDULERS = "dflash_vllm.plugin.scheduler"  # the module of our schedulers, whose widths follow the load
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""Half of a pair -> vLLM's `kv_role`; `kv_both` is deprecated there (nixl/connector.py)."""
KEYS_MIDDLEWARE = "dflash_vllm.plugin.keys.EveryRoute"  # vLLM's own check of keys covers a part of its routes
KEEPS_OUTSIDE = {"kv-offloading-size", "kv-transfer-config"}
"""Arguments with which vLLM keeps K/V in host memory or on other machines (OffloadingConnector, LMCache)."""
Flag = tuple[str, ...]  # `--name` and its value, or `--name` alone


LAUNCHER = "vllm.entrypoints.cli.main"
"""The module behind the command `vllm`; this Python runs it, so that it is the vLLM that was checked."""


class VLLMLaunch(VLLMSettings):
    """A launch of vLLM 0.32-0.33. Needs neither a GPU nor vLLM until the command is run."""

    def _problems(self) -> list[Problem]:
        return problems(self)

    @property
    def problems_here(self) -> list[Problem]:
        return list(side_channel_problems(self))

    def _draft_form(self, drafter: DrafterConfig) -> DraftForm:
        """vLLM reads every key, and the target's name in speculators' dialect."""
        dialect = dialect_of(drafter)
        words = "z-lab's dialect" if dialect == "zlab" else f"the dialect {dialect}"
        return DraftForm(dialect, words, self.deployment.target.model, behind=self.target.shape.num_layers)

    def _command(self, folder: Path, host: str, port: int) -> Command:
        """The command line for a prepared folder."""
        argv = [sys.executable, "-m", LAUNCHER, "serve", *self._arguments(folder)]
        env = {GUESSED_COSTS: self.guessed_costs} if self.has_our_scheduler else {}
        return Command((*argv, "--host", host, "--port", str(port)), {**env, **self._shared_environment(folder)})

    def _choices(self) -> Iterator[Choice]:
        """Settings that the deployment leaves open.

        Raises:
            UserError: the cost table or the survival that was given is none.
        """
        deployment = self.deployment
        if deployment.limits.max_batch_size is None:
            yield self._max_batch_size()
        if deployment.limits.max_model_len is None and self.target.shape.max_position_embeddings is not None:
            longest = self.target.shape.max_position_embeddings
            yield Choice("limits.max_model_len", f"{longest}", "the target's positions")
        if self.drafter is not None:
            yield from self._speculation_choices()
        if deployment.hardware.gpu is None:
            yield Choice("hardware.gpu", "not named", "memory is not checked")
        if deployment.hardware.dtype == "auto":
            why = "what losslessness is exact in" if self.on_cpu else "what drafters are published in"
            yield Choice("hardware.dtype", self.dtype, why)

    def _notes(self) -> Iterator[str]:
        """Limits that no key of the deployment mentions."""
        if self.is_half:
            yield from self._half_notes()
        if self.drafter is None:
            return
        if self.verifies_whole_blocks:
            family = self.drafter.family
            yield f"{family} on vLLM was read, not run: compare it with the target by `dflash-serve verify`"
        if captures(self) is None:
            target = self.target.shape.model_type
            yield f"not checked: whether vLLM's model for {target!r} hands out hidden states, which a drafter needs"
        if self.untrimmed is None:
            yield "/metrics counts drafted tokens that vLLM did not verify as rejected; `doctor` needs a fixed width"
        yield "requests with min_p or logit_bias are answered by HTTP 400: vLLM has neither with speculation"
        width = self.deployment.speculation.width
        if not self.v1_runner and isinstance(width, int) and width < (self.block_size or 0):
            yield f"below a whole block vLLM drafts without CUDA graphs; speculation.block_size: {width} has them"
        release = RELEASES.numbers(RELEASES.installed())
        if 1 in self.widths and not self.on_cpu and (release is None or release < REAL_OFF):
            yield "before vLLM 0.33 steps without speculation still pay for a draft: use 0.33"
        if self.draft_kernels is not None:
            theirs = f"those that vLLM chooses on an SM{self.compute} ended a server at its start (vllm#50707)"
            yield f"the drafter's attention runs on vLLM's Triton kernels: {theirs}; no such GPU has run this"
        yield from self._cache_notes()

    def _cache_notes(self) -> Iterator[str]:
        """Costs of the drafter's K/V beside the target's, and beside K/V that are kept outside the GPUs."""
        counted = groupings(self)
        if counted is not None and counted[1].groups > counted[0].groups:
            alone, both = counted
            sizes = f"{both.request_bytes / GIB:.1f} GiB of a GPU, {alone.request_bytes / GIB:.1f} without the drafter"
            yield (
                f"vLLM makes {both.groups} K/V groups of target and drafter, {alone.groups} of the target alone, and "
                "prepares the attention of each one in every step (vllm#49730); a request of the longest length takes "
                f"about {sizes}"
            )
        if KEEPS_OUTSIDE & {*self.in_effect} and not self.is_half:
            yield (
                "K/V that are kept outside the GPUs may stay unused: where the drafter's are missing, vLLM also "
                "computes the target's again (vllm#47890); vllm:external_prefix_cache_hits_total should rise"
            )

    def _half_notes(self) -> Iterator[str]:
        yield "pairs of vLLM ran on CPUs alone: on GPUs compare the acceptance with that of one whole server"
        if self.drafter is not None and self.deployment.role == "decode":
            yield "vLLM counts one rejected block more for each request of a decode half, which was never drafted"
        if NIXL_HOST not in os.environ:
            yield f"set {NIXL_HOST} to an address of this machine that the other half reaches: vLLM's own is localhost"
        if self.drafter is not None:
            yield "start both halves with the same --folder: they refuse each other if their drafters' paths differ"

    def _arguments(self, folder: Path) -> list[str]:
        """The command line without host and port, the target first; the user's own arguments come last."""
        parts = (
            self._models(),
            self._serving(folder),
            self._precision(),
            self._parallel(),
            self._limits(),
            self._speculation(folder),
        )
        ours = [word for part in parts for flag in part for word in flag]
        return [self.deployment.target.model, *ours, *argument_table(self).words(self.engine_args)]

    def _models(self) -> Iterator[Flag]:
        if self.deployment.target.revision is not None:
            yield "--revision", self.deployment.target.revision
        if self.is_half:
            transfer = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[self.deployment.role]}
            yield "--kv-transfer-config", json.dumps(transfer)
        # Otherwise generation_config.json sets sampling parameters that no request asked for.
        yield "--generation-config", "vllm"

    def _serving(self, folder: Path) -> Iterator[Flag]:
        # Keys go into a file: every user of the machine can read a command line.
        serving = self.deployment.serving
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

    def _precision(self) -> Iterator[Flag]:
        yield "--dtype", self.dtype
        if self.deployment.target.quantization == "fp8" and self.target.native_quantization is None:
            yield "--quantization", "fp8"  # a quantised checkpoint says so itself; other formats are refused
        if self.on_cpu and "enforce-eager" not in self.given:
            yield ("--enforce-eager",)  # compiling for a CPU takes minutes at every start
        if self.deployment.kv_cache.dtype != "auto":
            yield "--kv-cache-dtype", self.deployment.kv_cache.dtype

    def _parallel(self) -> Iterator[Flag]:
        yield "--tensor-parallel-size", str(self.deployment.parallel.tensor)
        if self.deployment.parallel.pipeline > 1:
            yield "--pipeline-parallel-size", str(self.deployment.parallel.pipeline)
        if self.deployment.parallel.expert > 1:
            yield ("--enable-expert-parallel",)

    def _limits(self) -> Iterator[Flag]:
        limits, cache = self.deployment.limits, self.deployment.kv_cache
        if limits.max_batch_size is not None or self.block_size is not None:
            yield "--max-num-seqs", str(self.max_batch_size)
        yield "--max-num-queued-reqs", str(limits.max_queued_requests)
        if limits.max_model_len is not None:
            yield "--max-model-len", str(limits.max_model_len)
        if self.block_size is not None:
            # Every request's block takes K slots more of the same buffer when it is drafted.
            yield "--max-num-batched-tokens", str(self.rows + self.max_batch_size * (self.block_size - 1))
            yield "--max-num-scheduled-tokens", str(self.rows)
        elif limits.max_num_tokens is not None:
            yield "--max-num-batched-tokens", str(limits.max_num_tokens)
        if cache.block_reuse is False:
            yield ("--no-enable-prefix-caching",)
        if cache.memory_fraction is not None and self.memory is not None:
            yield "--gpu-memory-utilization", str(self.memory.fraction(cache.memory_fraction))

    def _speculation(self, folder: Path) -> Iterator[Flag]:
        if self.block_size is None:
            return
        yield "--speculative-config", json.dumps(self.speculative_config(folder / DRAFT))
        if self.has_our_scheduler:
            scheduler = "WidthScheduler" if self.on_cpu else "AsyncWidthScheduler"
            yield SCHEDULER, f"{SCHEDULERS}.{scheduler}"
        if self.graph_sizes is not None:
            yield "--cudagraph-capture-sizes", *map(str, self.graph_sizes)

    def speculative_config(self, draft: Path) -> dict[str, object]:
        """vLLM's `SpeculativeConfig` (config/speculative.py): greedy drafts, and the acceptance test that is exact."""
        assert self.block_size is not None
        assert self.drafter is not None
        method = method_of(self.drafter)
        config: dict[str, object] = {
            "method": method,
            "model": str(draft),
            "num_speculative_tokens": self.block_size - 1,
            "draft_tensor_parallel_size": self.deployment.parallel.tensor,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
        }
        if method == "dflash":
            # K/V of a context token are of that token alone, where EAGLE's are of the next one, too: vLLM would leave
            # the last block that it has of a prompt unused. DSpark's was not tried.
            config["disable_eagle_block_drop"] = True
        if self.untrimmed is None:
            config["enable_adaptive_verification"] = True
        if self.widths != (self.block_size,):
            # Graphs of trimmed blocks are of any width; further rows would only add drafter graphs that are never used.
            captured = self.widths if self.untrimmed else self.widths[-1:]
            schedule = self.schedule() or every_width(captured, self.max_batch_size)
            config["num_speculative_tokens_per_batch_size"] = schedule
        if not self.on_cpu:
            # Otherwise a drafter takes over the target's, which may be FP8.
            config["kv_cache_dtype"] = "bfloat16"
        if self.draft_kernels is not None:
            config["attention_backend"] = self.draft_kernels
        return config

    def _max_batch_size(self) -> Choice:
        if self.drafter is not None:
            why = "each has a whole block of rows in a step; vLLM's own number on large GPUs is 1024"
            return Choice("limits.max_batch_size", f"{self.max_batch_size}", why)
        return Choice("limits.max_batch_size", "vLLM's choice", "by the GPU's memory; vLLM logs it")

    def _speculation_choices(self) -> Iterator[Choice]:
        limits, speculation = self.deployment.limits, self.deployment.speculation
        if limits.max_num_tokens is None:
            own = f"vLLM's own number on {self.gpu.name if self.gpu else 'h100'}"
            why = own if self.rows > self.block_rows else "a full batch of blocks"
            yield Choice("limits.max_num_tokens", f"{self.rows}", why)
        if speculation.block_size is None:
            yield Choice("speculation.block_size", f"{self.block_size}", "the drafter's own")
        whole = (self.verifies_whole_blocks or self.is_half) and self.untrimmed is not None
        width = self.block_size if whole else speculation.width
        yield Choice("speculation.width", str(width), self._width())

    def _width(self) -> str:
        """The part that chooses the width, and the reason."""
        if self.widths != (self.block_size,) and self.schedule() is not None:
            return "a schedule computed from the costs and the survival that were given"
        trims = (
            f"vLLM drafts blocks of {self.block_size} slots and verifies those slots that pay (adaptive verification)"
        )
        if self.has_our_scheduler and self.untrimmed is None:
            return f"{trims}; our scheduler inside vLLM decides at every step whether to draft, which vLLM cannot"
        if self.has_our_scheduler:
            return (
                f"our scheduler inside vLLM chooses {', '.join(map(str, self.widths))} at every step: {self.untrimmed}"
            )
        if self.is_half:
            return "whole blocks: one half of a disaggregated pair"
        if self.verifies_whole_blocks and self.drafter is not None:
            kept = f"vLLM's own {self.drafter.family}: whole blocks, the width never changes: {self.untrimmed}"
            return trims if self.untrimmed is None else kept
        return "whole blocks" if self.widths == (self.block_size,) else "one width in every step"

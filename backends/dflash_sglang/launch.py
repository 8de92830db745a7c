"""`SGLangLaunch`: command, choices and notes of a launch of SGLang's own server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_serve.adapter.launch import SECRETS, DraftForm
from dflash_serve.adapter.protocol import Choice, Command
from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.deployment.gpus import GIB
from dflash_serve.errors import Problem, UserError

from .checks import host_memory_problems, problems
from .engine_arguments import PARSERS, argument_table
from .layouts import method_of
from .settings import (
    BACKUP,
    DRAFT_KERNELS,
    DSPARK,
    HOST_RESERVE,
    REPLAY,
    TRANSFER,
    WIDTH_VARIABLE,
    SGLangSettings,
    dialect_of,
)

KV_DTYPES = {"auto": None, "bfloat16": "bfloat16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
LEADER, SIZE, INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
"""Variables by which Kubernetes' LeaderWorkerSet tells a process its place among several nodes."""
DISTRIBUTED_PORT = 20000  # port of the leader's torch.distributed

HICACHE, LMCACHE = "enable-hierarchical-cache", "enable-lmcache"  # SGLang's flags: K/V kept outside the GPUs
Flag = tuple[str, ...]  # `--name` and its value, or `--name` alone


def node_arguments(nodes: int, environment: Mapping[str, str]) -> list[str]:
    """--nnodes, --node-rank and --dist-init-addr; nothing on a single node.

    Raises:
        UserError: the environment does not say which node this is, or tells of another number of nodes.
    """
    if nodes == 1:
        return []
    missing = [name for name in (LEADER, SIZE, INDEX) if name not in environment]
    if missing:
        what = f"{nodes} nodes, but {', '.join(missing)} is not set"
        raise UserError(what, where="parallel.nodes", do="start it in a LeaderWorkerSet, or set the variables")
    if environment[SIZE] != str(nodes):
        what = f"{nodes} nodes, but {SIZE} is {environment[SIZE]}"
        raise UserError(what, where="parallel.nodes", do="make the two agree")
    address = f"{environment[LEADER]}:{DISTRIBUTED_PORT}"
    return ["--nnodes", str(nodes), "--node-rank", environment[INDEX], "--dist-init-addr", address]


SPECULATING_REQUESTS = 48
"""SGLang 0.5.23's --max-running-requests for speculation, where none is given (arg_groups/speculative_hook.py)."""


class SGLangLaunch(SGLangSettings):
    """A launch of SGLang 0.5.23. Needs neither a GPU nor SGLang until the command is run."""

    def _problems(self) -> list[Problem]:
        return problems(self)

    @property
    def problems_here(self) -> list[Problem]:
        return list(host_memory_problems(self))

    def _draft_form(self, drafter: DrafterConfig) -> DraftForm:
        """z-lab's or DeepSpec's dialect, in bfloat16."""
        dialect = dialect_of(drafter)
        return DraftForm(dialect, f"{'z-lab' if dialect == 'zlab' else 'DeepSpec'}'s dialect", dtype="bfloat16")

    def _command(self, folder: Path, host: str, port: int) -> Command:
        """The command line for a prepared folder; on several nodes, the command of the node that this runs on.

        Raises:
            UserError: several nodes, and the environment does not say which this is.
        """
        argv = [sys.executable, "-m", "sglang.launch_server", *self._arguments(folder)]
        argv += node_arguments(self.deployment.parallel.nodes, os.environ)
        width = self.block_size if self.width is None else self.width
        env = {} if self.algorithm is None else {WIDTH_VARIABLE: str(width)}
        return Command((*argv, "--host", host, "--port", str(port)), {**env, **self._shared_environment(folder)})

    def _choices(self) -> Iterator[Choice]:
        """Settings that the deployment leaves open."""
        deployment = self.deployment
        limits, speculation, gpu = deployment.limits, deployment.speculation, self.gpu
        if limits.max_batch_size is None:
            yield self._max_batch_size()
        if limits.max_model_len is None and self.target.shape.max_position_embeddings is not None:
            longest = self.target.shape.max_position_embeddings
            yield Choice("limits.max_model_len", f"{longest}", "the target's positions")
        if self.drafter is not None and speculation.block_size is None:
            yield Choice("speculation.block_size", f"{self.block_size}", "the drafter's own")
        if self.drafter is not None:
            own = f"SGLang's own {self.drafter.family}: the width never changes"
            why = own if self.width is None else "our worker in SGLang serves it"
            width = self.block_size if self.whole_blocks_with is not None else speculation.width
            yield Choice("speculation.width", str(width), why)
        if gpu is None:
            yield Choice("hardware.gpu", "not named", "memory is not checked, and SGLang chooses the attention kernels")
        elif self.algorithm is not None and DRAFT_KERNELS not in self.given:
            why = f"what serves DFlash on {gpu.name}; SGLang chooses the target's by model"
            yield Choice("the drafter's attention", self.draft_kernels or "SGLang's choice", why)
        if self.is_half and TRANSFER not in self.given and self.transfer is None:
            why = "SGLang's own, over RDMA; mooncake_tcp needs none, nixl is the other; the same on both halves"
            yield Choice("pair.transfer", "mooncake", why)
        if deployment.hardware.dtype == "auto":
            yield Choice("hardware.dtype", "bfloat16", "what SGLang's DFlash computes in")

    def _notes(self) -> Iterator[str]:
        """Limits that no key of the deployment mentions."""
        if self.is_as_published:
            yield (
                "SGLang is given the drafter's folder as it was published, and verifies whole blocks: its class loaded "
                "this form on a CPU, and was not run with it"
            )
        if self.algorithm == DSPARK:
            yield "SGLang's own DSPARK serves it: our plug-in counts no slots there, and refuses penalties and min_p"
        elif self.drafter is not None and self.width is None:
            yield "requests with penalties are refused: SGLang's own DFlash would not apply them"
        if self.whole_blocks_with is not None and self.deployment.speculation.width == "auto":
            whole = f"whole blocks of {self.block_size} slots with {self.whole_blocks_with}"
            yield f"SGLang verifies {whole}: auto changes nothing"
        if self.has_host_copy and not self.given & {"hicache-ratio", "hicache-size"}:
            copy = (
                "" if self.host_copy is None else f", {self.host_copy / GIB:.0f} GiB for each GPU where there is room"
            )
            yield (
                f"SGLang keeps host memory for the K/V of requests that it retracts{copy}, and ends at start unless "
                f"{HOST_RESERVE / GIB:.0f} GiB stay free beside it; with engine_args.sglang.{BACKUP}: cpu_tensor it "
                "keeps none, and retracted requests draft without their context"
            )
        if self.drafter is not None and LMCACHE in self.in_effect:
            yield (
                "SGLang gives LMCache the target's K/V alone (read, not run; sglang#21125 mended HiCache alone): after "
                f"a prompt that {LMCACHE} loads, acceptance may fall; with {HICACHE} the drafter's K/V are kept, too"
            )
        deltas = self.target.recurrent and self.target.shape.model_type.startswith("qwen3")
        if self.block_size is not None and deltas and REPLAY not in self.in_effect:
            states = (self.block_size + 1) * self.target.state_bytes / self.deployment.parallel.tensor / GIB
            yield (
                f"each request keeps {self.block_size + 1} recurrent states on a device, {states:.1f} GiB; with "
                f"engine_args.sglang.{REPLAY} (not tried) it keeps one, and SGLang verifies whole blocks"
            )

    def _arguments(self, folder: Path) -> list[str]:
        """The command line without host, port and `node_arguments`; the user's own arguments come last."""
        parts = (
            self._models(),
            self._precision(),
            self._parallel(),
            self._limits(),
            self._serving(folder),
            self._speculation(folder),
        )
        ours = [word for part in parts for flag in part for word in flag]
        return [*ours, "--enable-metrics", *argument_table(self.deployment).words(self.engine_args)]

    def _models(self) -> Iterator[Flag]:
        target = self.deployment.target
        yield "--model-path", target.model
        if target.revision is not None:
            yield "--revision", target.revision
        if self.is_half:
            yield "--disaggregation-mode", self.deployment.role
        if self.is_half and self.transfer is not None:
            yield f"--{TRANSFER}", self.transfer

    def _precision(self) -> Iterator[Flag]:
        yield "--dtype", "bfloat16"
        if self.deployment.target.quantization == "fp8" and self.target.native_quantization is None:
            yield "--quantization", "fp8"  # a quantised checkpoint says so itself, and SGLang converts to no other
        kv_dtype = KV_DTYPES[self.deployment.kv_cache.dtype]
        if kv_dtype is not None:
            yield "--kv-cache-dtype", kv_dtype

    def _parallel(self) -> Iterator[Flag]:
        parallel = self.deployment.parallel
        yield "--tp-size", str(parallel.tensor)
        if parallel.data > 1:
            yield "--dp-size", str(parallel.data)
        if parallel.expert > 1:
            yield "--ep-size", str(parallel.expert)
        if parallel.pipeline > 1:
            yield "--pp-size", str(parallel.pipeline)
        if parallel.attention_data and parallel.tensor > 1:
            yield "--attn-dp-size", str(parallel.tensor)
            yield ("--enable-dp-lm-head",)  # DFlash under data-parallel attention asks for it

    def _limits(self) -> Iterator[Flag]:
        limits, cache = self.deployment.limits, self.deployment.kv_cache
        if self.requests_of_a_copy is not None:
            # SGLang divides it among ranks of data-parallel attention, but not among copies (`resolve_max_num_reqs`).
            yield "--max-running-requests", str(self.requests_of_a_copy)
        yield "--max-queued-requests", str(limits.max_queued_requests)
        if limits.max_model_len is not None:
            yield "--context-length", str(limits.max_model_len)
        if limits.max_num_tokens is not None:
            yield "--chunked-prefill-size", str(limits.max_num_tokens)
        if cache.block_reuse is False:
            yield ("--disable-radix-cache",)
        if cache.memory_fraction is not None and self.memory is not None:
            yield "--mem-fraction-static", str(self.memory.fraction(cache.memory_fraction))

    def _serving(self, folder: Path) -> Iterator[Flag]:
        # The key goes into a file: every user of the machine can read a command line.
        serving = self.deployment.serving
        if serving.served_model_name is not None:
            yield "--served-model-name", serving.served_model_name
        for key, _, name in PARSERS.of(serving):
            yield f"--{key.replace('_', '-')}", name
        if serving.api_key_file is not None:
            yield "--config", str(folder / SECRETS)
        if serving.otlp_traces_endpoint is not None:
            yield ("--enable-trace",)
            yield "--otlp-traces-endpoint", serving.otlp_traces_endpoint
        if serving.log_format == "json" and "log-level-http" not in self.given:
            yield "--log-level-http", "warning"  # uvicorn's own lines are text

    def _speculation(self, folder: Path) -> Iterator[Flag]:
        if self.algorithm is None:
            return
        yield "--speculative-algorithm", self.algorithm
        yield "--speculative-draft-model-path", str(self.draft_folder(folder))
        yield "--speculative-num-draft-tokens", str(self.block_size)
        if self.algorithm == DSPARK and self.block_size is not None:
            yield "--speculative-dspark-block-size", str(self.block_size - 1)
            # SGLang's own value, which it sets for DSPARK only after it has chosen the target's kernels by it.
            yield "--speculative-eagle-topk", "1"
        # Otherwise a draft inherits the target's quantisation and K/V format, and accepts next to nothing.
        yield "--speculative-draft-model-quantization", method_of(self.checkpoint)
        if "speculative-draft-kv-cache-dtype" not in self.given:
            yield "--speculative-draft-kv-cache-dtype", "bfloat16"
        if self.target.penalises and self.width is None:
            # SGLang would penalise every request by the model's defaults, and wrongly so (`plugin.refusals`).
            yield "--sampling-defaults", "openai"
        if self.deployment.speculation.draft_window is not None:
            yield "--speculative-draft-window-size", str(self.deployment.speculation.draft_window)
        kernels = self.draft_kernels
        if kernels is not None and DRAFT_KERNELS not in self.given:
            yield f"--{DRAFT_KERNELS}", kernels

    def _max_batch_size(self) -> Choice:
        copies = self.deployment.parallel.data
        each = " on each copy of the model" if copies > 1 else ""
        if self.drafter is not None:
            own = f", {SPECULATING_REQUESTS}{each}" if each else ""
            why = f"SGLang's own number for speculation{own}; it lowers it where memory is short"
            return Choice("limits.max_batch_size", f"{SPECULATING_REQUESTS * copies}", why)
        why = f"SGLang takes what its K/V memory holds{each}, and logs it"
        return Choice("limits.max_batch_size", "SGLang's choice", why)

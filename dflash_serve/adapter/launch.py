"""`EngineLaunch`: the launch of a deployment on SGLang, vLLM or TensorRT-LLM, as far as the three share it.

An engine's package adds its arguments, its refusals, its facts and its plug-in: `settings` computes what follows from
the deployment, the target and the drafter, `checks` finds problems of these settings, and `launch` has the class that
`serve` uses.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import yaml
from pydantic import JsonValue

from dflash_serve.adapter.arguments import EngineArgs
from dflash_serve.adapter.checks import (
    changed_files,
    layer_problems,
    precision_notes,
    target_file_problems,
    uses_drafter,
)
from dflash_serve.adapter.draft_layouts import stored_bytes
from dflash_serve.adapter.protocol import Backend, Choice, Command, Launch, PreparedFile, ServerBackend
from dflash_serve.checkpoint.config import DrafterConfig, context_bytes, in_layer_order
from dflash_serve.checkpoint.declaring import declarations
from dflash_serve.checkpoint.reader import DIALECTS, Checkpoint, open_checkpoint, stored_of
from dflash_serve.checkpoint.source import PROVENANCE, drafter_source, record_survival, recorded_survival
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, target_configuration
from dflash_serve.checkpoint.writer import fc_in_layer_order, write_drafter
from dflash_serve.common.files import write_whole
from dflash_serve.common.http import read_keys
from dflash_serve.common.json_log import logging_config
from dflash_serve.common.processes import PATIENCE_SECONDS, free_port, require_program, running
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GIB, GPUS, Gpu
from dflash_serve.deployment.pair import HALVES, half_of
from dflash_serve.errors import Problem, raise_problems

DRAFT, SECRETS, LOGGING = "draft", "secrets.yaml", "logging.json"
"""Names, below the prepared folder, of the drafter, the server's API keys and its log configuration."""
KV_BYTES = {"auto": 2.0, "bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Bytes of one number in the K/V cache, by `kv_cache.dtype`."""
SAFETENSORS = ("auto", "safetensors")  # engines' values of `load-format` for the weights in a target's folder
OTHER_TOKENIZER = ("tokenizer", "tokenizer-path", "custom-tokenizer", "skip-tokenizer-init")
"""Arguments of engines with which they do not read the tokenizer in a target's folder."""
HINT = "`dflash-serve serve --dry-run` shows all"


def kv_bytes_each(deployment: Deployment, target: TargetLayout) -> float:
    """Bytes of one number in the target's K/V cache; `auto` is the format that its checkpoint requests."""
    kind = deployment.kv_cache.dtype
    return KV_BYTES["fp8" if kind == "auto" and target.quantized_kv else kind]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, on the safe side; K/V of target and drafter both count for every token."""

    total: int
    target: int  # Weights, as `drafter`
    drafter: int
    token: int  # K/V of one token in layers without a window
    windows: int  # K/V of one sequence in layers with windows, which are full, and its recurrent states
    running: int  # Neither weights nor K/V: CUDA context, workspaces, CUDA graphs, activations

    @property
    def pool(self) -> int:
        """Left for K/V; may be negative."""
        return self.total - self.target - self.drafter - self.running

    @property
    def tokens(self) -> int:
        return max(0, (self.pool - self.windows) // max(1, self.token))

    def fraction(self, share: float) -> float:
        """Share of all memory for weights and K/V, where K/V gets `share` of the memory that weights leave."""
        weights = self.target + self.drafter
        return round((weights + share * (self.total - weights)) / self.total, 3)


@dataclass(frozen=True)
class DraftForm:
    """The form in which an engine reads a drafter."""

    dialect: str
    words: str  # `z-lab's dialect`, as it is called in a dry run
    target: str | None = None  # Name of the target, where the engine reads it in the drafter's config.json
    dtype: str | None = None  # Number format of weights that are not quantised; None = as the checkpoint has them
    behind: int | None = None  # Layers of the target, behind which the engine numbers the drafter's; None = it does not


@dataclass(frozen=True, kw_only=True)
class EngineLaunch(Launch):
    """A deployment with its target and its drafter, as their files describe them."""

    name: ClassVar[str]
    title: ClassVar[str]  # Of the engine in messages: `SGLang`
    one_key: ClassVar[bool] = False  # The server takes one API key
    loggers: ClassVar[Sequence[str]] = ()  # Loggers of the engine that have handlers of their own
    logging_variable: ClassVar[str] = ""  # Environment variable that names the log configuration
    alike: ClassVar[Sequence[str]] = ()
    """Arguments of which both halves of a pair need one value; () = the engine's table refuses pairs."""

    target: TargetLayout
    drafter: DrafterConfig | None
    """With ascending `target_layer_ids`, as `_write_draft` writes it. None = no speculation, or a drafter that cannot
    be understood (its checkpoint's problems say why)."""
    checkpoint: Checkpoint | None = None
    """The drafter's folder and tensor headers; None = no speculation, or read by `prepare`."""
    described: Deployment | None = None
    """The pair whose half this is; None = the deployment has no `pair`."""

    @classmethod
    def of(cls, deployment: Deployment) -> Self:
        """The launch of a deployment; reads config.json files and safetensors headers, once.

        Raises:
            UserError: the target or drafter cannot be found or read at all, or a half has impossible GPUs.
        """
        described = None
        if deployment.pair is not None and deployment.role != "whole":
            described, deployment = deployment, half_of(deployment, deployment.role)
        checkpoint = None
        if uses_drafter(deployment) and deployment.drafter is not None:
            source, block_size = drafter_source(deployment.drafter.model), deployment.speculation.block_size
            checkpoint = open_checkpoint(source, deployment.drafter.revision, block_size=block_size)
        target = read_target_layout(target_configuration(deployment.target), deployment.target)
        drafter = None if checkpoint is None or checkpoint.config is None else in_layer_order(checkpoint.config)
        return cls(deployment=deployment, target=target, drafter=drafter, checkpoint=checkpoint, described=described)

    @abstractmethod
    def _problems(self) -> Iterable[Problem]:
        """Problems of this engine, in the order in which a user would fix them."""

    @abstractmethod
    def _choices(self) -> Iterator[Choice]:
        """Settings that the deployment leaves open."""

    @abstractmethod
    def _notes(self) -> Iterator[str]:
        """Limits of the engine that no key of the deployment mentions."""

    @abstractmethod
    def _command(self, folder: Path, host: str, port: int) -> Command:
        """The command line for a prepared folder (absolute)."""

    @abstractmethod
    def _draft_form(self, drafter: DrafterConfig) -> DraftForm:
        """The form in which the engine reads this drafter."""

    @property
    def engine_args(self) -> EngineArgs:
        return self.deployment.engine_args.get(self.name, {})

    @property
    def given(self) -> set[str]:
        """Names of `engine_args`, with dashes."""
        return {name.replace("_", "-") for name in self.engine_args}

    @property
    def in_effect(self) -> dict[str, JsonValue]:
        """`engine_args`, named with dashes, without flags that are off: `x: false`. `no-x: false` is `x: true`."""
        flags = {name.replace("_", "-"): value for name, value in self.engine_args.items()}
        for name in [name for name, value in flags.items() if value is False]:
            del flags[name]
            if name.startswith("no-"):
                flags[name.removeprefix("no-")] = True
        return flags

    @property
    def is_as_published(self) -> bool:
        """The engine reads the drafter's folder as it was published; else one that `prepare` writes."""
        return False

    def draft_folder(self, folder: Path) -> Path:
        """The drafter's folder that the engine reads.

        Args:
            folder: the prepared one.
        """
        if self.is_as_published and self.checkpoint is not None:
            return self.checkpoint.folder.resolve()
        return folder / DRAFT

    @property
    def block_size(self) -> int | None:
        """B; None without speculation."""
        if self.drafter is None:
            return None
        return self.deployment.speculation.block_size or self.drafter.block_size

    @property
    def requests_of_a_copy(self) -> int | None:
        """Requests that one copy of the model runs at the same time; None = open."""
        asked = self.deployment.limits.max_batch_size
        return None if asked is None else max(1, asked // self.deployment.parallel.data)

    @property
    def gpu(self) -> Gpu | None:
        return GPUS.get(self.deployment.hardware.gpu or "none")

    @property
    def on_cpu(self) -> bool:
        return self.deployment.hardware.gpu == "none"

    @property
    def drafter_devices(self) -> int:
        """Devices that share the drafter: attention data parallelism gives each a whole one."""
        parallel = self.deployment.parallel
        return 1 if parallel.attention_data else parallel.tensor

    @property
    def running_bytes(self) -> int:
        """Memory of a device beside weights and K/V."""
        return 0

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        """The estimate for one device; None where the deployment does not name its GPU."""
        if self.gpu is None:
            return None
        split = self.drafter_devices
        each, shared = kv_bytes_each(self.deployment, self.target), min(split, self.target.kv_heads)
        shared = 1 if self.target.latent else shared
        most = max((layer.window or 0 for layer in self.target.kv_layers), default=0)
        token = (self.target.kv_bytes(each, most + 1) - self.target.kv_bytes(each, most)) // shared
        windows = self.target.kv_bytes(each, most) // shared - most * token
        drafter, states = 0, 1
        if self.drafter is not None:
            # A recurrent state cannot be cut back to what was accepted: engines keep one for every slot, too.
            states += self.block_size or 0
            drafter = self._drafter_bytes(self.drafter) // split
            token += context_bytes(self.drafter) // self.drafter.kv_split(split)
        windows += states * self.target.state_bytes // split
        weights = self.target.weight_bytes // self.deployment.parallel.tensor
        return MemoryEstimate(self.gpu.memory, weights, drafter, token, windows, self.running_bytes)

    def _drafter_bytes(self, drafter: DrafterConfig) -> int:
        """Bytes of its weights; those of a copy of the target's embedding count where the engine keeps the copy."""
        found = stored_bytes(self.checkpoint, drafter)
        if self.is_as_published and self.checkpoint is not None:
            found += sum(one.bytes for name, one in self.checkpoint.headers.items() if name in self.checkpoint.copies)
        return found

    @property
    def is_half(self) -> bool:
        """One half of a disaggregated pair."""
        return self.deployment.role != "whole"

    @property
    def transfer(self) -> str | None:
        """`pair.transfer`; None = the engine's own way of the K/V."""
        return None if self.deployment.pair is None else self.deployment.pair.transfer

    @cached_property
    def other_half(self) -> Self | None:
        """The launch of the pair's other half; None where the deployment does not describe it."""
        if self.described is None:
            return None
        (role,) = (role for role in HALVES if role != self.deployment.role)
        return replace(self, deployment=half_of(self.described, role), described=None)

    def _pair_problems(self) -> Iterator[Problem]:
        """Problems of the other half, and settings in which the halves may not differ."""
        if self.deployment.pair is not None and not self.is_half and self.alike:
            what = "a pair of servers, and this command starts one of its halves"
            yield Problem(what, "pair", "add --role prefill or --role decode, or leave pair out")
        other = self.other_half
        if other is None:
            return
        theirs, role = other.deployment.role, self.deployment.role
        for problem in other.problems:
            if problem not in self._own_problems:
                yield Problem(f"the {theirs} half: {problem.what}", problem.where, problem.do)
        for name in self.alike:
            ours, given = self.in_effect.get(name), other.in_effect.get(name)
            if ours != given:
                first, second = ("not given" if value is None else str(value) for value in (ours, given))
                what = f"{first} on the {role} half, {second} on the {theirs} half"
                where = f"pair.{role}.engine_args.{self.name}.{name}"
                yield Problem(what, where, "give both halves the same: the K/V of one is read by the other")
        yield from self._unequal_gpus(other)

    def _unequal_gpus(self, other: EngineLaunch) -> Iterator[Problem]:
        """Numbers of GPUs between which the drafter's K/V cannot be cut as the target's are."""
        tensor, others = self.deployment.parallel.tensor, other.deployment.parallel.tensor
        if self.drafter is None or tensor == others:
            return
        ours, theirs = self.target.kv_heads, self.drafter.num_key_value_heads
        where, do = f"pair.{self.deployment.role}.gpus", "give both halves the same parallel.tensor"
        if self.target.latent:
            what = "every GPU has all of the target's latent K/V and a part of the drafter's"
        elif ours != theirs:
            what = f"the target has {ours} K/V heads and the drafter {theirs}"
        elif max(tensor, others) > ours:
            what = f"target and drafter have {ours} K/V heads"
        else:
            return
        yield Problem(f"{tensor} GPUs on this half and {others} on the other one, but {what}", where, do)

    @cached_property
    def problems(self) -> list[Problem]:
        return [*self._own_problems, *self._pair_problems()]

    @cached_property
    def _own_problems(self) -> list[Problem]:
        problems, flags = list(self._problems()), self.in_effect
        if self.drafter is not None:
            problems += layer_problems(self.drafter, self.title)
        weights = flags.get("load-format", "auto") in SAFETENSORS
        return problems + target_file_problems(
            self.deployment.target.model, weights=weights, tokenizer=flags.keys().isdisjoint(OTHER_TOKENIZER)
        )

    @cached_property
    def choices(self) -> list[Choice]:
        return list(self._choices())

    @cached_property
    def notes(self) -> list[str]:
        return [*self._notes(), *self._pair_notes(), *self._unpacked(), *self._pairing_notes()]

    def _pair_notes(self) -> Iterator[str]:
        if self.other_half is not None:
            yield (
                f"checked against the {self.other_half.deployment.role} half as this file describes it: start that "
                f"half with the same file and the same release of {self.title}"
            )

    def _pairing_notes(self) -> Iterator[str]:
        target, drafter = self.deployment.target, self.deployment.drafter
        if drafter is not None:
            asked = None if target.quantization == "none" else target.quantization
            yield from precision_notes(drafter.model, target.model, asked or self.target.native_quantization)

    def _unpacked(self) -> Iterator[str]:
        formats, gpu = (self.deployment.target.quantization, self.target.native_quantization), self.gpu
        for name, kind in (("nvfp4", "FP4"), ("fp8", "FP8")):
            if gpu is not None and name in formats and not (gpu.has_fp4 if name == "nvfp4" else gpu.has_fp8):
                what = f"{gpu.name} has no {kind} arithmetic: {name.upper()} weights are unpacked at each use"
                yield f"{what}, which only saves memory"

    def command(self, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        return self._command(folder.resolve(), host, port)

    def files(self, folder: Path) -> list[PreparedFile]:
        return [*self._own_files(folder.resolve()), *self._draft_files(), *self._shared_files()]

    def prepare(self, folder: Path) -> None:
        """Writes the files that the engine reads. Built models are compared with their manifests first."""
        raise_problems(self.problems, hint=HINT)
        raise_problems(changed_files(self.deployment))
        folder = folder.resolve()
        files = [*self._own_files(folder), *self._shared_files()]
        if self.drafter is not None and not self.is_as_published:
            self._write_draft(folder / DRAFT)
        for file in files:
            if file.text is not None:
                write_whole(folder / file.name, file.text)
        if self.deployment.serving.api_key_file is not None:
            keys = read_keys(self.deployment.serving.api_key_file)
            secret = {"api-key": keys[0] if self.one_key else keys}
            write_whole(folder / SECRETS, yaml.safe_dump(secret), private=True)

    def _own_files(self, folder: Path) -> Iterator[PreparedFile]:
        """Files of this engine alone, with their text."""
        yield from ()

    def _draft_files(self) -> Iterator[PreparedFile]:
        """Files of the drafter, as a dry run shows them."""
        if self.drafter is None or self.checkpoint is None or self.is_as_published:
            return
        form = self._draft_form(self.drafter)
        typed = {} if form.dtype is None else {"dtype": form.dtype, "torch_dtype": form.dtype}
        fields = {**DIALECTS[form.dialect].write(self.drafter, form.target), **typed}
        files = declarations(self.drafter, self.checkpoint.quantised, form.behind)
        files["config.json"] = {**fields, **files.get("config.json", {})}
        for name, keys in files.items():
            text, about = json.dumps(keys, indent=2, sort_keys=True) + "\n", "the form of its quantised weights"
            about = f"the drafter's description in {form.words}" if name == "config.json" else about
            yield PreparedFile(f"{DRAFT}/{name}", about, text)
        kept = self.checkpoint.quantization
        written = f" in {form.dtype}" if form.dtype else ""
        written = written if kept is None else f", quantised to {kept.words}"
        about = f"the drafter's {len(self.checkpoint.headers)} tensors{written}"
        yield PreparedFile(f"{DRAFT}/model.safetensors", about)
        if recorded_survival(self.checkpoint.folder) is not None:
            about = "how far its blocks are accepted: what `width: auto` begins with"
            yield PreparedFile(f"{DRAFT}/{PROVENANCE}", about)

    def _shared_files(self) -> Iterator[PreparedFile]:
        if self.deployment.serving.api_key_file is not None:
            about = "the API key, readable by its owner alone"
            about = about if self.one_key else "the API keys, readable by their owner alone"
            yield PreparedFile(SECRETS, about)
        if self.deployment.serving.log_format == "json":
            yield PreparedFile(LOGGING, "logs as JSON", logging_config(*self.loggers))

    def _write_draft(self, folder: Path) -> None:
        """Writes the drafter, whole or not at all.

        Raises:
            UserError: the checkpoint has problems, or something that is no drafter stands there.
        """
        assert self.checkpoint is not None
        assert self.checkpoint.config is not None
        assert self.drafter is not None
        form, quantised = self._draft_form(self.drafter), self.checkpoint.quantised
        tensors = fc_in_layer_order(stored_of(self.checkpoint), self.checkpoint.config.target_layer_ids)
        if form.dtype is not None:
            import torch

            dtype = getattr(torch, form.dtype)
            plain = {name for name in tensors if name.rpartition(".")[0] not in quantised}
            tensors = {name: tensor.to(dtype) if name in plain else tensor for name, tensor in tensors.items()}
        write_drafter(
            folder,
            self.drafter,
            tensors,
            dialect=form.dialect,
            target=form.target,
            overwrite=True,
            quantised=quantised,
            behind=form.behind,
        )
        record_survival(folder, recorded_survival(self.checkpoint.folder))

    def _shared_environment(self, folder: Path) -> dict[str, str]:
        return {self.logging_variable: str(folder / LOGGING)} if self.deployment.serving.log_format == "json" else {}


def memory_problems(launch: EngineLaunch) -> Iterator[Problem]:
    """Weights or one longest request that do not fit on a device; nothing where no GPU is named."""
    memory = launch.memory
    if memory is None or launch.gpu is None:
        return
    if memory.pool <= 0:
        target, drafter, running, total = (
            f"{size / GIB:.1f} GiB" for size in (memory.target, memory.drafter, memory.running, memory.total)
        )
        what = f"one device needs {target} for the target, {drafter} for the drafter and {running} to run"
        do = "use more devices (parallel.tensor), or a quantised target"
        yield Problem(f"{what}, but one {launch.gpu.name} has {total}", "hardware", do)
        return
    longest = launch.deployment.limits.max_model_len or launch.target.shape.max_position_embeddings
    if longest is not None and memory.tokens < longest:
        what = f"{longest} tokens, but after the weights there is room for the K/V of about {memory.tokens}"
        yield Problem(what, "limits.max_model_len", "shorten it, use kv_cache.dtype fp8, or more devices")


def drafting_argument(backend: Backend, deployment: Deployment) -> str | None:
    """The argument in `engine_args` that makes the engine draft without a drafter of ours; None = there is none."""
    own, given = backend.facts.drafting_arguments, deployment.engine_args.get(backend.name, {})
    return next((name for name in given if name.replace("-", "_") in own), None)


@contextmanager
def running_server(
    backend: ServerBackend,
    deployment: Deployment,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    patience: float = PATIENCE_SECONDS,
) -> Iterator[str]:
    """Starts a server without an API key and gives its URL when it is ready; ends it with the block, also on errors.

    Args:
        folder: for the files that the server reads, and its log, `server.log`.
        env: added to the environments of this process and of the backend.
        patience: seconds until the server must be ready.

    Raises:
        UserError: the server cannot be started, ends by itself, or is not ready in time.
    """
    # Only our own clients use the server, so it needs no key.
    serving = deployment.serving.model_copy(update={"api_key_file": None})
    launch = backend.launch(deployment.model_copy(update={"serving": serving}))
    raise_problems(launch.problems_of_start, hint=HINT)
    port = free_port()
    command = launch.command(folder, port=port)
    require_program(command.argv, backend.name)  # before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    launch.prepare(folder)
    url, environment = f"http://127.0.0.1:{port}", {**os.environ, **command.env, **(env or {})}
    ready = url + backend.facts.probes.ready
    with running(command.argv, folder / "server.log", env=environment, ready=ready, patience=patience):
        yield url

"""The embedded engine as a Backend: checks a Deployment and starts it in this process. Imports torch at the start."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_serve.adapter.checks import (
    block_problems,
    check_pairing,
    length_problems,
    measurement_problems,
    unused_speculation,
)
from dflash_serve.adapter.protocol import Command, LookingBackend, PreparedFile, Preview, ServerBackend
from dflash_serve.answers.engine import Engine, Prompt
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.files import tokenizer_problems
from dflash_serve.checkpoint.quantization import plain_only, plain_target_only
from dflash_serve.checkpoint.reader import open_checkpoint
from dflash_serve.checkpoint.source import drafter_folder, target_folder, target_source
from dflash_serve.checkpoint.target import read_target_shape, target_configuration
from dflash_serve.checkpoint.target_config import read_target_headers, target_config
from dflash_serve.checkpoint.target_files import read_target
from dflash_serve.common.extras import import_problem
from dflash_serve.common.files import write_whole
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.doctor.evidence import DiagnosableBackend, Steps
from dflash_serve.errors import Problem, raise_problems
from dflash_serve.speculation.params import SamplingParams

from .facts import FACTS, SETTINGS_PREFIX
from .launch import (
    argument_problems,
    choices,
    choose_waiting,
    memory_here,
    memory_problems,
    readable,
    server_environment,
    sizes,
    waiting_here,
    with_batch_size,
)

if TYPE_CHECKING:
    from .engine import EmbeddedEngine
    from .faults.replay import EmbeddedReference
    from .faults.tensors import Difference

DEPLOYMENT_FILE = "deployment.json"
# Fields of a Deployment that this backend supports; the others must have their defaults.
HONOURED = {
    *("target.model", "target.revision", "drafter.model", "drafter.revision"),
    *("speculation.block_size", "speculation.width", "hardware.gpu", "hardware.dtype"),
    *("limits.max_batch_size", "limits.max_model_len", "limits.max_queued_requests"),
    *("serving.served_model_name", "serving.api_key_file", "serving.log_format"),
}

ONE_ENGINE = {
    "speculation.draft_window": "sglang",
    "role": "sglang",
    "parallel.context": "tensorrt-llm",
    "drafter.quantization": "tensorrt-llm",
}
"""Fields that only one other backend serves."""


class EmbeddedBackend(ServerBackend, LookingBackend, DiagnosableBackend):
    """PyTorch in this process: one device, Llama- and Qwen-family targets, unquantised.

    It runs every head of a drafter; a confidence head is read and not used.
    """

    name = "torch"
    facts = FACTS
    releases = "this release"
    untried = ()

    def check(self, deployment: Deployment) -> list[Problem]:
        if broken := import_problem("PyTorch", "torch"):
            return [broken]  # the bundled target is converted by it
        target, drafter = deployment.target, deployment.drafter
        source = target_source(target.model)
        shape = replace(read_target_shape(source, target.revision), name=target.model)
        problems = [*_unsupported(deployment), *argument_problems(deployment), *length_problems(deployment, shape)]
        problems += _target_problems(target.model_copy(update={"model": str(source)}))
        if drafter is None:
            return [*problems, *unused_speculation(deployment)]
        checkpoint = open_checkpoint(drafter.model, drafter.revision)
        config = checkpoint.config
        problems += checkpoint.problems
        problems += plain_only(checkpoint.quantization, "the embedded backend", "drafter.model")
        if config is None:
            return problems
        problems += [*check_pairing(config, shape), *block_problems(deployment, config)]
        return [*problems, *measurement_problems(deployment)]

    def head_problems(self, heads: Heads) -> list[Problem]:
        return []

    def engine(self, deployment: Deployment) -> EmbeddedEngine:
        choose_waiting()  # before torch is there: the check imports it
        raise_problems(self.check(deployment))
        from .engine import start_engine

        try:
            return start_engine(with_batch_size(deployment))
        except (MemoryError, RuntimeError) as error:
            raise readable(error) from None

    def reference(
        self,
        engine: Engine,
        deployment: Deployment,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        width: int,
        steps: Sequence[Steps] | None = None,
    ) -> EmbeddedReference:
        from dflash_serve.models.loader import load_drafter

        from .engine import EmbeddedEngine
        from .faults.replay import EmbeddedReference

        assert isinstance(engine, EmbeddedEngine)
        assert deployment.drafter is not None
        embedding, drafter = engine.scheduler.target.embedding, deployment.drafter
        sound = load_drafter(drafter.model, revision=drafter.revision, dtype=embedding.dtype, device=embedding.device)
        return EmbeddedReference(engine, sound, prompts, params, width, steps)

    def first_difference(self, engine: Engine, deployment: Deployment, prompt: Prompt) -> Difference | None:
        from .engine import EmbeddedEngine
        from .faults.tensors import first_difference

        assert isinstance(engine, EmbeddedEngine)
        assert deployment.drafter is not None
        target, drafter = deployment.target, deployment.drafter
        folders = target_folder(target.model, target.revision), drafter_folder(drafter.model, drafter.revision)
        return first_difference(engine, *folders, prompt)

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        raise_problems(self.check(deployment))
        # A server reserves its whole K/V cache; without the memory it would be killed under load.
        raise_problems(memory_problems(deployment, *sizes(deployment), memory_here(deployment)))
        write_whole(folder / DEPLOYMENT_FILE, deployment.model_dump_json(indent=1))

    def preview(self, deployment: Deployment, folder: Path) -> Preview:
        written = PreparedFile(DEPLOYMENT_FILE, "the deployment, merged", deployment.model_dump_json(indent=1))
        memory = memory_here(deployment)
        problems = memory_problems(deployment, *sizes(deployment), memory)
        return Preview(
            [written], list(choices(deployment, memory)), [f"on this machine, {problem}" for problem in problems]
        )

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        argv = (sys.executable, "-m", "dflash_torch.server", str(folder.resolve() / DEPLOYMENT_FILE))
        listening = {f"{SETTINGS_PREFIX}HOST": host, f"{SETTINGS_PREFIX}PORT": str(port)}
        return Command(argv, {**listening, **server_environment(deployment)})

    def look(self) -> Mapping[str, str]:
        return waiting_here()


def _target_problems(target: Model) -> list[Problem]:
    """Problems of a target's files. Without weights here only the configuration is read, as of a hub id."""
    files = read_target(target_configuration(target))
    config = target_config(files)
    if not any(Path(target.model).glob("*.safetensors*")):
        return plain_target_only(files.recipe, {}, files.folder)
    _, problems = read_target_headers(files, config)
    return problems + tokenizer_problems(files.folder)


def _unsupported(deployment: Deployment) -> list[Problem]:
    asked = _leaves(deployment.model_dump(exclude_defaults=True))
    instead = {"parallel.data": "set it to 1, and take replicas: `dflash-serve deploy`"}
    other = {field: f"--backend {ONE_ENGINE[field]}" if field in ONE_ENGINE else "another --backend" for field in asked}
    do = {field: f"leave it out, or serve with {engine}" for field, engine in other.items()} | instead
    return [
        Problem(f"the embedded backend has no such thing (given: {value!r})", field, do[field])
        for field, value in asked.items()
        if field not in HONOURED and not field.startswith("engine_args.")
    ]


def _leaves(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:  # {"a": {"b": 1}} -> {"a.b": 1}
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


backend = EmbeddedBackend()

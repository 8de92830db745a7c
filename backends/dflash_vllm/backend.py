"""vLLM as a Backend: it answers about a Deployment and hands out a command; vLLM's own server does the serving."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml
from pydantic import JsonValue

from dflash_serve.backend import Command
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.reader import Checkpoint, load_tensors
from dflash_serve.checkpoint.source import record_survival, recorded_survival
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.common.files import write_whole
from dflash_serve.common.json_log import logging_config
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import changed_files, read_keys
from dflash_serve.draft_method import Eagle3Head
from dflash_serve.errors import Problem, raise_problems
from dflash_serve.preview import Preview

from .arguments import DRAFT, LOGGERS, LOGGING, SECRETS, arguments
from .checks import problems
from .engine_arguments import own_arguments
from .facts import FACTS, TESTED
from .heads import UNTRIED, dialect_of, head_problems
from .launch_plan import LaunchPlan, read_launch_plan
from .methods import DRAFTING, method_arguments, method_problems
from .preview import preview
from .schedule import GUESSED_COSTS

LAUNCHER = "vllm.entrypoints.cli.main"
"""What the command `vllm` runs; by this Python, so that it is the vLLM that was checked."""

LOGGING_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"


class VLLMBackend:
    """Checks and command line for vLLM 0.32-0.33. Needs neither a GPU nor vLLM until the command is run."""

    name = "vllm"
    facts = FACTS
    releases = TESTED
    untried = UNTRIED
    drafting_arguments = DRAFTING

    def __init__(self) -> None:
        self._prepared: LaunchPlan | None = None

    def check(self, deployment: Deployment) -> list[Problem]:
        """Everything that would not work; reads config.json files and safetensors headers only.

        Raises:
            UserError: the target or drafter cannot be found or read at all.
        """
        return problems(read_launch_plan(deployment))

    def head_problems(self, heads: Heads) -> list[Problem]:
        """What this backend does not serve of a drafter with such heads."""
        return list(head_problems(heads))

    def method_problems(self, target: TargetLayout, head: Eagle3Head | None) -> Iterable[Problem]:
        """Why vLLM does not draft by EAGLE-3 (a head) or MTP (None)."""
        return method_problems(target, head)

    def method_arguments(self, head: Eagle3Head | None, draft_tokens: int) -> dict[str, JsonValue]:
        """vLLM's own arguments for it."""
        return method_arguments(head, draft_tokens)

    def own_arguments(self, *, drafter: bool) -> Mapping[str, str]:
        """Arguments of the server that keys of the deployment stand for, with those keys."""
        return own_arguments(drafter=drafter)

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        """Writes draft/ and the API keys. A built target or drafter is held against its manifest first, byte for byte.

        Raises:
            UserError: the first problem of `check`, a built file that was changed, or a drafter that cannot be read.
        """
        plan = read_launch_plan(deployment)
        raise_problems(problems(plan), hint="`dflash-serve serve --dry-run` shows all")
        raise_problems(changed_files(deployment))
        if plan.checkpoint is not None:
            _write_draft_folder(plan.checkpoint, folder.resolve() / DRAFT, deployment.target.model)
        if deployment.serving.api_key_file is not None:
            keys = read_keys(deployment.serving.api_key_file)
            write_whole(folder / SECRETS, yaml.safe_dump({"api-key": keys}), private=True)
        if deployment.serving.log_format == "json":
            write_whole(folder / LOGGING, logging_config(*LOGGERS))
        self._prepared = plan

    def preview(self, deployment: Deployment, folder: Path) -> Preview:
        """What `prepare` would write, and what is chosen where the deployment leaves it open.

        Raises:
            UserError: the target or drafter cannot be found or read at all.
        """
        return preview(read_launch_plan(deployment))

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """The command line for a prepared folder.

        What `prepare` has just read of the same deployment is not read again: the command goes with that folder.
        """
        prepared = self._prepared
        plan = prepared if prepared and prepared.deployment == deployment else read_launch_plan(deployment)
        argv = [sys.executable, "-m", LAUNCHER, "serve", *arguments(plan, folder.resolve())]
        env = {GUESSED_COSTS: plan.guessed_costs} if plan.has_our_scheduler else {}
        if deployment.serving.log_format == "json":
            env[LOGGING_VARIABLE] = str(folder.resolve() / LOGGING)
        return Command((*argv, "--host", host, "--port", str(port)), env)


def _write_draft_folder(checkpoint: Checkpoint, folder: Path, target: str) -> None:
    """Writes the drafter as vLLM reads it (every key; one file, plain names), whole or not at all.

    Raises:
        UserError: the checkpoint has problems, or something that is no drafter stands there.
    """
    config = checkpoint.config
    assert config is not None
    tensors = load_tensors(checkpoint)
    write_drafter(folder, config, tensors, dialect=dialect_of(config), target=target, overwrite=True)
    record_survival(folder, recorded_survival(checkpoint.folder))


backend = VLLMBackend()

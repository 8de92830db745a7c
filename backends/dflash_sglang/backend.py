"""SGLang as a Backend: it answers about a Deployment and hands out a command; SGLang's own server does the serving."""

from __future__ import annotations

import os
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

from .arguments import DRAFT, LOGGING, SECRETS, arguments, node_arguments
from .checks import problems
from .contract import printed
from .engine_arguments import own_arguments
from .facts import FACTS, TESTED
from .heads import dialect_of, head_problems
from .launch_plan import WIDTH_VARIABLE, LaunchPlan, read_launch_plan
from .methods import DRAFTING, method_arguments, method_problems
from .planner_table import FILE as PLANNER
from .planner_table import planner_costs, planner_table
from .preview import SPECULATING_REQUESTS, preview

LOGGING_VARIABLE = "SGLANG_LOGGING_CONFIG_PATH"


class SGLangBackend:
    """Checks and command line for SGLang 0.5.23. Needs neither a GPU nor SGLang until the command is run."""

    name = "sglang"
    facts = FACTS
    releases = TESTED
    untried = ()
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
        """What SGLang does not serve of a drafter with such heads."""
        return list(head_problems(heads))

    def method_problems(self, target: TargetLayout, head: Eagle3Head | None) -> Iterable[Problem]:
        """Why SGLang does not draft by EAGLE-3 (a head) or MTP (None)."""
        return method_problems(target, head)

    def method_arguments(self, head: Eagle3Head | None, draft_tokens: int) -> dict[str, JsonValue]:
        """SGLang's own arguments for it."""
        return method_arguments(head, draft_tokens)

    def own_arguments(self, *, drafter: bool) -> Mapping[str, str]:
        """Arguments of the server that keys of the deployment stand for, with those keys."""
        return own_arguments(drafter=drafter)

    def contract(self) -> Iterable[str]:
        """Every name of SGLang that the plug-in relies on, and whether it holds in the installed release."""
        return printed()

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        """Writes draft/, the API key, and costs for DSPARK's planner.

        A built target or drafter is held against its manifest first, byte for byte.

        Raises:
            UserError: the first problem of `check`, a built file that was changed, or a drafter that cannot be read.
        """
        plan = read_launch_plan(deployment)
        raise_problems(problems(plan), hint="`dflash-serve serve --dry-run` shows all")
        raise_problems(changed_files(deployment))
        if plan.checkpoint is not None:
            _write_draft_folder(plan.checkpoint, folder.resolve() / DRAFT)
        costs = None if plan.drafter is None else planner_costs(plan.drafter)
        if costs is not None and plan.block_size is not None:
            batch = deployment.limits.max_batch_size or SPECULATING_REQUESTS
            write_whole(folder / PLANNER, planner_table(costs, batch * plan.block_size))
        if deployment.serving.api_key_file is not None:
            key = read_keys(deployment.serving.api_key_file)[0]
            write_whole(folder / SECRETS, yaml.safe_dump({"api-key": key}), private=True)
        if deployment.serving.log_format == "json":
            write_whole(folder / LOGGING, logging_config("sglang"))
        self._prepared = plan

    def preview(self, deployment: Deployment, folder: Path) -> Preview:
        """What `prepare` would write, and what is chosen where the deployment leaves it open.

        Raises:
            UserError: the target or drafter cannot be found or read at all.
        """
        return preview(read_launch_plan(deployment))

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """The command line for a prepared folder; on several nodes, that of the node it is asked on.

        What `prepare` has just read of the same deployment is not read again: the command goes with that folder.

        Raises:
            UserError: several nodes, and the environment does not say which this is.
        """
        prepared = self._prepared
        plan = prepared if prepared and prepared.deployment == deployment else read_launch_plan(deployment)
        argv = [sys.executable, "-m", "sglang.launch_server", *arguments(plan, folder.resolve())]
        argv += node_arguments(deployment.parallel.nodes, os.environ)
        width = plan.block_size if plan.width is None else plan.width
        env = {} if plan.algorithm is None else {WIDTH_VARIABLE: str(width)}
        if deployment.serving.log_format == "json":
            env[LOGGING_VARIABLE] = str(folder.resolve() / LOGGING)
        return Command((*argv, "--host", host, "--port", str(port)), env)


def _write_draft_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes the drafter as SGLang reads it (z-lab's or DeepSpec's dialect, bfloat16, one file), whole or not at all.

    Raises:
        UserError: the checkpoint has problems, or something that is no drafter stands there.
    """
    import torch

    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_tensors(checkpoint).items()}
    assert checkpoint.config is not None
    write_drafter(folder, checkpoint.config, tensors, dialect=dialect_of(checkpoint.config), overwrite=True)
    record_survival(folder, recorded_survival(checkpoint.folder))


backend = SGLangBackend()

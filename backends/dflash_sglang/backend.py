"""SGLang as a Backend: it answers about a Deployment and hands out a command; SGLang's own server does the serving."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dflash_serve.backend import Command
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import changed_files
from dflash_serve.errors import Problem, raise_problems

from .arguments import DRAFT, arguments
from .checks import problems
from .draft_folder import write_draft_folder
from .facts import FACTS
from .nodes import node_arguments
from .plan import OURS, Plan, make_plan
from .widths import WIDTH


class SGLangBackend:
    """Checks and command line for SGLang 0.5.22-0.5.23. Needs neither a GPU nor SGLang until the command is run."""

    name = "sglang"
    facts = FACTS

    def check(self, deployment: Deployment) -> list[Problem]:
        """Everything that would not work; reads config.json files and safetensors headers only.

        Raises:
            UserError: the target or drafter cannot be found or read at all.
        """
        return problems(make_plan(deployment))

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        """Writes draft/. A built target or drafter is held against its manifest first, byte for byte.

        Raises:
            UserError: the first problem of `check`, a built file that was changed, or a drafter that cannot be read.
        """
        plan = self._sound_plan(deployment)
        raise_problems(changed_files(deployment))
        if plan.checkpoint is not None:
            write_draft_folder(plan.checkpoint, folder.resolve() / DRAFT)

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """The command line for a prepared folder; on several nodes, that of the node it is asked on.

        Raises:
            UserError: several nodes, and the environment does not say which this is.
        """
        plan = make_plan(deployment)
        argv = [sys.executable, "-m", "sglang.launch_server", *arguments(plan, folder.resolve())]
        argv += node_arguments(deployment.parallel.nodes, os.environ)
        env = {WIDTH: str(deployment.speculation.width)} if plan.algorithm == OURS else {}
        return Command((*argv, "--host", host, "--port", str(port)), env)

    def _sound_plan(self, deployment: Deployment) -> Plan:
        plan = make_plan(deployment)
        raise_problems(problems(plan), hint="`dflash-serve serve --dry-run` shows all")
        return plan


backend = SGLangBackend()

"""TensorRT-LLM as a Backend: it answers about a Deployment and hands out a command; `trtllm-serve` does the serving."""

from __future__ import annotations

from pathlib import Path

import yaml

from dflash_serve.backend import Command
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import changed_files
from dflash_serve.errors import Problem, raise_problems

from .checks import problems
from .command import CONFIG, DRAFT, PLUG_IN, command_of
from .configuration import configuration
from .draft_folder import write_draft_folder
from .facts import FACTS
from .plan import Plan, make_plan
from .release import Release, installed_release

REGISTERING = '''"""Written by `dflash-serve`: registers its drafter with TensorRT-LLM wherever this is imported."""

from dflash_tensorrt_llm.plugin import register

TargetModel = register({architecture!r}, __name__)
'''


class TensorRTLLMBackend:
    """Checks, configuration and command line for TensorRT-LLM's PyTorch backend.

    Args:
        release: of TensorRT-LLM; None = the installed one, or the newest we know.
    """

    name = "tensorrt-llm"
    facts = FACTS

    def __init__(self, release: Release | None = None) -> None:
        self._release = release

    @property
    def release(self) -> Release:
        """The release it writes for."""
        return self._release or installed_release()

    def check(self, deployment: Deployment) -> list[Problem]:
        """Everything that would not work; reads config.json files only.

        Raises:
            UserError: the target or drafter cannot be found or read at all.
        """
        return problems(make_plan(deployment, self.release))

    def prepare(self, deployment: Deployment, folder: Path) -> None:
        """Writes config.yaml, draft/ and, where the built-in drafter would not do, the package that registers ours.

        A built target or drafter is held against its manifest first, byte for byte.

        Raises:
            UserError: the first problem of `check`, a built file that was changed, or a drafter that cannot be read.
        """
        plan = self._sound_plan(deployment)
        raise_problems(changed_files(deployment))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if plan.drafter is not None:
            assert deployment.drafter is not None
            write_draft_folder(deployment.drafter, plan.drafter, folder / DRAFT)
            if plan.implementation == "plug-in":
                text = REGISTERING.format(architecture=plan.target.architecture)
                _write(folder / PLUG_IN / "__init__.py", text)
        _write(folder / CONFIG, self.yaml(plan, folder))

    def command(self, deployment: Deployment, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        """The command line and environment for a prepared folder."""
        return command_of(make_plan(deployment, self.release), folder.resolve(), host, port)

    def yaml(self, plan: Plan, folder: Path) -> str:
        """The text of config.yaml.

        Raises:
            UserError: the release would refuse it.
        """
        return yaml.safe_dump(configuration(plan, folder / DRAFT).yaml_fields(), sort_keys=False)

    def _sound_plan(self, deployment: Deployment) -> Plan:
        plan = make_plan(deployment, self.release)
        raise_problems(problems(plan), hint="`dflash-serve serve --dry-run` shows all")
        return plan


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


backend = TensorRTLLMBackend()

"""SGLang as a backend: its name, its facts, and the launch of a deployment."""

from __future__ import annotations

from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem

from .facts import FACTS, RELEASES
from .launch import SGLangLaunch
from .layouts import LAYOUTS, storage_problems
from .settings import head_problems


class SGLangBackend(ServerBackend):
    """SGLang's own server."""

    name = SGLangLaunch.name
    facts = FACTS
    releases = str(RELEASES)
    untried = ()
    layouts = LAYOUTS

    def launch(self, deployment: Deployment) -> SGLangLaunch:
        return SGLangLaunch.of(deployment)

    def described(self, deployment: Deployment, target: TargetLayout, drafter: DrafterConfig) -> SGLangLaunch:
        return SGLangLaunch(deployment=deployment, target=target, drafter=drafter)

    def head_problems(self, heads: Heads) -> list[Problem]:
        return list(head_problems(heads))

    def storage_problems(self, checkpoint: Checkpoint) -> list[Problem]:
        return list(storage_problems(checkpoint, 1, str(checkpoint.folder)))


backend = SGLangBackend()

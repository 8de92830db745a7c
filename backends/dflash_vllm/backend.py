"""vLLM as a backend: its name, its facts, and the launch of a deployment."""

from __future__ import annotations

from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem

from .drafter_rules import UNTRIED, head_problems
from .facts import FACTS, RELEASES
from .launch import VLLMLaunch
from .layouts import LAYOUTS, storage_problems


class VLLMBackend(ServerBackend):
    """vLLM's own server."""

    name = VLLMLaunch.name
    facts = FACTS
    releases = str(RELEASES)
    untried = UNTRIED
    layouts = LAYOUTS

    def launch(self, deployment: Deployment) -> VLLMLaunch:
        return VLLMLaunch.of(deployment)

    def described(self, deployment: Deployment, target: TargetLayout, drafter: DrafterConfig) -> VLLMLaunch:
        return VLLMLaunch(deployment=deployment, target=target, drafter=drafter)

    def head_problems(self, heads: Heads) -> list[Problem]:
        return head_problems(heads)

    def storage_problems(self, checkpoint: Checkpoint) -> list[Problem]:
        where = str(checkpoint.folder)
        return list(storage_problems(checkpoint, 1, where, dtype="bfloat16", on_cpu=False))


backend = VLLMBackend()

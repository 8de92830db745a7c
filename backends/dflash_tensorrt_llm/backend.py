"""TensorRT-LLM as a backend: its name, its facts, and the launch of a deployment."""

from __future__ import annotations

from dataclasses import replace

from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.checkpoint.config import DrafterConfig, Heads
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem

from .checks import LAYOUTS, storage_problems, unserved_heads
from .facts import FACTS
from .launch import TensorRTLLMLaunch
from .upstream import NEWEST, OLDEST, Release, installed_release


class TensorRTLLMBackend(ServerBackend):
    """TensorRT-LLM's own server, `trtllm-serve`.

    Args:
        release: of TensorRT-LLM; None = the installed one, or the newest that was read.
    """

    name = TensorRTLLMLaunch.name
    facts = FACTS
    releases = f"{OLDEST} to {NEWEST}"
    untried = ("DFlash2", "DSpark")
    layouts = LAYOUTS

    def __init__(self, release: Release | None = None) -> None:
        self._release = release

    @property
    def release(self) -> Release:
        """The release that it writes for."""
        return self._release or installed_release()

    def launch(self, deployment: Deployment) -> TensorRTLLMLaunch:
        return replace(TensorRTLLMLaunch.of(deployment), release=self.release)

    def described(self, deployment: Deployment, target: TargetLayout, drafter: DrafterConfig) -> TensorRTLLMLaunch:
        return TensorRTLLMLaunch(deployment=deployment, target=target, drafter=drafter, release=self.release)

    def head_problems(self, heads: Heads) -> list[Problem]:
        return list(unserved_heads(heads, self.release))

    def storage_problems(self, checkpoint: Checkpoint) -> list[Problem]:
        return list(storage_problems(checkpoint, str(checkpoint.folder)))


backend = TensorRTLLMBackend()

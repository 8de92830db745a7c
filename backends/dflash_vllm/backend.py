"""vLLM as a Backend that serves nothing yet: every Deployment is a problem, but its metrics can be read."""

from __future__ import annotations

from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem

from .facts import FACTS


class VLLMBackend:
    """Facts about vLLM's own server."""

    name = "vllm"
    facts = FACTS

    def check(self, deployment: Deployment) -> list[Problem]:
        """One problem: we do not start vLLM yet."""
        do = "use --backend torch, sglang or tensorrt-llm; a running vLLM server is read by verify, doctor and bench"
        return [Problem("dflash-serve does not start vLLM yet", "--backend vllm", do)]


backend = VLLMBackend()

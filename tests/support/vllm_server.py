"""The real vLLM server on a CPU, started by our backend's own command, and a small client."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import Command
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.common.prometheus import Samples
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.verify.questions import FEWEST, VerifyPlan
from dflash_vllm import VLLMBackend
from dflash_vllm.facts import FACTS
from dflash_vllm.launch import VLLMLaunch
from tests.support.children import settled

ON_CPU = ("--served-model-name", "m", "--long-prefill-token-threshold", "256")
"""On top of our command: a long prompt goes in several chunks. (Only such a one: a seeded request whose prompt is cut
ends vLLM's engine on a CPU, `gpu_model_runner.py:3502`.)"""
ENVIRONMENT = {
    **FACTS.environment,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}
PATIENCE = float(os.environ.get("DFLASH_SERVE_TEST_PATIENCE", "900"))
"""Seconds that a server may take to start, or to answer; more on a machine that others use."""
CROWD = 16
"""Requests that a server takes at once."""
LIMITS = {"max_batch_size": CROWD, "max_model_len": 1024, "max_num_tokens": 2048}
AT_ONCE = 64
"""Requests that are verified at once: larger batches take less time for each."""
BRIEFLY = VerifyPlan(
    prompts=4, prompts_sha256="", max_tokens=24, samples=FEWEST, sample_tokens=4, pairs=4, long_tokens=64,
    dtype="float32",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OnCpuLaunch(VLLMLaunch):
    """The launch of `serve`, on a CPU."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def _command(self, folder: Path, host: str, port: int) -> Command:
        command = super()._command(folder, host, port)
        env = {**ENVIRONMENT, **command.env, **self.env}
        return replace(command, argv=(*command.argv, *ON_CPU, *self.flags), env=env)


class OnCpu(VLLMBackend):
    """Our backend, its command with what the CPU build needs, and some more.

    Args:
        port: None = a free one.
    """

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None, port: int | None = None) -> None:
        super().__init__()
        self.flags, self.env, self.port = flags, env or {}, port

    def launch(self, deployment: Deployment) -> VLLMLaunch:
        """The launch of `serve`, on a CPU."""
        return replace(OnCpuLaunch.of(deployment), flags=self.flags, env=self.env)


@dataclass(frozen=True)
class Server:
    """A running one, and the folder that was prepared for it."""

    url: str
    folder: Path

    def get(self, path: str) -> str:
        """The page; an HTTP error raises."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
            text: str = answer.read().decode()
            return text

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's JSON; an HTTP error raises."""
        request = urllib.request.Request(self.url + path, json.dumps({"model": "m", **body}).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def complete(self, prompt: str | Sequence[int], tokens: int = 24, **more: Any) -> dict[str, Any]:
        """One choice of a completion, its token ids told; greedy and of full length unless told otherwise."""
        asked = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **more}
        answer = self.post("/v1/completions", {"prompt": prompt, **asked})
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def tokens(self, prompts: Sequence[str | Sequence[int]], tokens: int = 24, streams: int = 1) -> list[list[int]]:
        """The answers' token ids, so many at a time."""
        with ThreadPoolExecutor(streams) as pool:
            return [answer["token_ids"] for answer in pool.map(lambda p: self.complete(p, tokens), prompts)]

    @property
    def samples(self) -> Samples:
        """Its metrics now."""
        return Samples(self.get(FACTS.metrics.path))

    def runs(self, requests: int) -> bool:
        """True once it answers this number of requests; False if it does not within a minute."""
        return settled(lambda: self.samples.total("vllm:num_requests_running"), requests)


def smollm2(width: int | str, **changes: Any) -> Deployment:
    """SmolLM2 and the drafter we ship; the test is skipped where there is no SmolLM2."""
    try:
        target = str(target_folder("smollm2"))
    except UserError as error:
        pytest.skip(str(error))
    return served((target, "smollm2"), width, **changes)


def served(models: tuple[Path | str, Path | str], width: int | str, **changes: Any) -> Deployment:
    """A target and a drafter on a CPU."""
    fields: dict[str, Any] = {
        "target": {"model": str(models[0])},
        "drafter": {"model": str(models[1])},
        "limits": LIMITS,
        "hardware": {"gpu": "none"},
        "speculation": {"width": width},
    }
    return Deployment.model_validate({**fields, **changes})


@contextmanager
def serving(folder: Path, deployment: Deployment, backend: OnCpu | None = None) -> Iterator[Server]:
    """A server that is ready; it is gone when the block ends."""
    with running_server(backend or OnCpu(), deployment, folder, patience=PATIENCE) as url:
        yield Server(url, folder)

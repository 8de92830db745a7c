"""The real SGLang server on a CPU, started by our backend's own command, and a small client."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import Command
from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.common.processes import running
from dflash_serve.common.prometheus import Samples
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_sglang import SGLangBackend
from dflash_sglang.facts import FACTS
from dflash_sglang.launch import SGLangLaunch
from tests.support.children import settled
from tests.support.tiny import tiny_drafter_config
from tests.support.tiny_target import SPECIALS, write_tiny_target

ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "8192"),
    *("--speculative-draft-kv-cache-dtype", "auto", "--sleep-on-idle", "--decode-log-interval", "1"),
)
"""On top of our command: the last flag of a name wins. In float32 losslessness is exact; gauges follow every step."""
ENVIRONMENT = {
    "SGLANG_PLATFORM": "torch_cpu",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    **FACTS.environment,
}
FORKED = {"SGLANG_CPU_FORK": "1"}
"""More variables, for a start in two thirds of the CPU time (`sglang_cpu_platform/processes.py`)."""
PATIENCE = float(os.environ.get("DFLASH_SERVE_TEST_PATIENCE", "900"))
"""Seconds that a server may take to start, or to answer; more on a machine that others use."""
CROWD = 16
"""Requests that a server of SmolLM2 takes at once."""
OF_REQUEST = ("return_logprob", "rid", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that stand beside the sampling parameters."""


@dataclass(frozen=True, kw_only=True)
class OnCpuLaunch(SGLangLaunch):
    """The launch of `serve`, on a CPU."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def _command(self, folder: Path, host: str, port: int) -> Command:
        command = super()._command(folder, host, port)
        env = {**ENVIRONMENT, **command.env, **self.env}
        return replace(command, argv=(*command.argv, *ON_CPU, *self.flags), env=env)


class OnCpu(SGLangBackend):
    """Our backend, its command with the flags of the CPU test platform and some more.

    Args:
        port: None = a free one.
    """

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None, port: int | None = None) -> None:
        super().__init__()
        self.flags, self.env, self.port = flags, env or {}, port

    def launch(self, deployment: Deployment) -> SGLangLaunch:
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

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer's JSON, None for an empty one; an HTTP error raises."""
        with self._open(path, body) as answer:
            text = answer.read()
            return json.loads(text) if text else None

    def _open(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, timeout=PATIENCE)

    def generate(self, prompt: str | Sequence[int], tokens: int = 24, **more: Any) -> dict[str, Any]:
        """Greedy unless told otherwise; `more` are sampling parameters, or fields of the request."""
        answer: dict[str, Any] = self.post("/generate", _asked(prompt, tokens, more))
        return answer

    def stream(
        self, prompt: str | Sequence[int], tokens: int = 24, **more: Any
    ) -> Generator[dict[str, Any], None, None]:
        """The same answer as it grows; closing the iterator hangs up."""
        body = {**_asked(prompt, tokens, more), "stream": True}
        with self._open("/generate", body) as lines:
            for line in lines:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    yield json.loads(data)

    def tokens(self, prompts: Sequence[str | Sequence[int]], tokens: int = 24, streams: int = 1) -> list[list[int]]:
        """The answers' token ids, so many at a time."""
        with ThreadPoolExecutor(streams) as pool:
            return [answer["output_ids"] for answer in pool.map(lambda p: self.generate(p, tokens), prompts)]

    @property
    def samples(self) -> Samples:
        """Its metrics now."""
        return Samples(self.get(FACTS.metrics.path))

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return self.samples.total(name) or 0.0

    def settled(self, name: str, value: float, patience: float = 60.0) -> bool:
        """As `children.settled`; SGLang refreshes its gauges now and then."""
        return settled(lambda: self.metric(name), value, patience)


def _asked(prompt: str | Sequence[int], tokens: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request."""
    outside = {key: value for key, value in more.items() if key in OF_REQUEST}
    inside = {key: value for key, value in more.items() if key not in OF_REQUEST}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **inside}
    given: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return {**given, "sampling_params": sampling, **outside}


def smollm2(width: int | str, drafter: str = "smollm2") -> Deployment:
    """SmolLM2 and the drafter we ship, or another; the test is skipped where there is no SmolLM2."""
    try:
        target = str(target_folder("smollm2"))
    except UserError as error:
        pytest.skip(str(error))
    fields: dict[str, Any] = {"target": {"model": target}, "drafter": {"model": drafter}}
    limits = {"max_batch_size": CROWD, "max_model_len": 1024}
    return Deployment.model_validate({**fields, "limits": limits, "speculation": {"width": width}})


def tiny_pair(folder: Path, block_size: int, family: str = "qwen3", **heads: Any) -> tuple[Path, DrafterConfig]:
    """A tiny target of 512 positions, written into `folder`, and the configuration of a drafter for it."""
    target = write_tiny_target(folder / "target", family=family, positions=512)
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    config = tiny_drafter_config(
        block_size=block_size,
        num_target_layers=4,
        target_layer_ids=(0, 1, 2),
        mask_token_id=SPECIALS.index("<mask>"),
        vocab_size=vocab_size,
        max_position_embeddings=512,
        **heads,
    )
    return target, config


def deployment(models: tuple[Path, Path], ranks: int = 1, requests: int = 8, **speculation: Any) -> Deployment:
    """Target and drafter, served to so many requests at once."""
    target, drafter = map(str, models)
    fields = {"target": {"model": target}, "drafter": {"model": drafter}, "limits": {"max_batch_size": requests}}
    devices = {"parallel": {"tensor": ranks}, "hardware": {"count": ranks}}
    return Deployment.model_validate({**fields, **devices, "speculation": speculation})


@contextmanager
def serving(folder: Path, deployment: Deployment, backend: OnCpu) -> Iterator[Server]:
    """A server that is ready; it is gone when the block ends."""
    if backend.port is None:
        with running_server(backend, deployment, folder, patience=PATIENCE) as url:
            yield Server(url, folder)
        return
    launch, url = backend.launch(deployment), f"http://127.0.0.1:{backend.port}"
    command = launch.command(folder, port=backend.port)
    folder.mkdir(parents=True, exist_ok=True)
    launch.prepare(folder)
    env, ready = {**os.environ, **command.env}, url + backend.facts.probes.ready
    with running(command.argv, folder / "server.log", env=env, ready=ready, patience=PATIENCE):
        yield Server(url, folder)

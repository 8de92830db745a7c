"""The real SGLang server on a CPU, started by our backend's own command, and a small client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_serve.deployment import Deployment
from dflash_sglang import SGLangBackend

ON_CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "8192",
          "--speculative-draft-kv-cache-dtype", "auto", "--sleep-on-idle")  # fmt: skip
"""On top of our command: the last flag of a name wins. In float32 losslessness is exact."""
ENVIRONMENT = {"SGLANG_PLATFORM": "torch_cpu", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
READY = "fired up and ready"
PATIENCE = 300.0
OF_REQUEST = ("return_logprob", "rid")
"""Fields that stand beside the sampling parameters."""


@dataclass(frozen=True)
class Server:
    """A running one."""

    port: int
    log: Path

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer's JSON, None for an empty one; an HTTP error raises."""
        with self._open(path, body) as answer:
            text = answer.read()
            return json.loads(text) if text else None

    def _open(self, path: str, body: Mapping[str, Any]) -> Any:
        url, text = f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode()
        request = urllib.request.Request(url, text, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=PATIENCE)

    def generate(self, prompt: str | Sequence[int], tokens: int = 24, **more: Any) -> dict[str, Any]:
        """Greedy unless told otherwise; `more` are sampling parameters, or fields of the request."""
        answer: dict[str, Any] = self.post("/generate", _asked(prompt, tokens, more))
        return answer

    def stream(self, prompt: str | Sequence[int], tokens: int = 24, **more: Any) -> Iterator[dict[str, Any]]:
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

    def metrics(self, name: str, label: str = "") -> dict[str, float]:
        """The samples of a metric, by the value of one label."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=PATIENCE) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith(name + "{")]
        found: dict[str, float] = {}
        for line in lines:
            value = re.search(rf'{label}="([^"]*)"', line) if label else None
            key = value[1] if value else ""
            found[key] = found.get(key, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return sum(self.metrics(name).values())

    def settled(self, name: str, value: float, patience: float = 60.0) -> bool:
        """Whether a gauge comes to a value; SGLang refreshes its gauges now and then."""
        end = time.monotonic() + patience
        while self.metric(name) != value and time.monotonic() < end:
            time.sleep(0.5)
        return self.metric(name) == value


def _asked(prompt: str | Sequence[int], tokens: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request."""
    outside = {key: value for key, value in more.items() if key in OF_REQUEST}
    inside = {key: value for key, value in more.items() if key not in OF_REQUEST}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **inside}
    given: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return {**given, "sampling_params": sampling, **outside}


@contextmanager
def serving(deployment: Deployment, folder: Path, *more: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Prepares, starts, waits until it is ready, and stops it."""
    backend = SGLangBackend()
    backend.prepare(deployment, folder)
    command = backend.command(deployment, folder, port=_free_port())
    process = _start((*command.argv, *ON_CPU, *more), {**command.env, **(env or {})}, folder / "server.log")
    try:
        _wait(process, folder / "server.log")
        yield Server(int(command.argv[-1]), folder / "server.log")
    finally:
        _stop(process)


def refusal(argv: Sequence[str], log: Path) -> str:
    """The log of a server that must not come up."""
    process = _start(argv, {}, log)
    try:
        with suppress(RuntimeError):
            _wait(process, log)
            raise AssertionError(f"it is ready; see {log}")
    finally:
        _stop(process)
    return log.read_text(encoding="utf-8", errors="replace")


def _start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        environment = {**os.environ, **ENVIRONMENT, **env}
        return subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if READY in log.read_text(encoding="utf-8", errors="replace"):
            return
        if process.poll() is not None:
            break
        time.sleep(0.3)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
    raise RuntimeError(f"not ready: {tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It and its children, which share a session of their own; asked politely, SGLang looks for causes first."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

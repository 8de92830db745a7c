"""Dynamo's frontend and its SGLang workers, really run; without etcd and NATS, they meet by files in a folder."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from dflash_serve.common.processes import free_port, running
from dflash_serve.deploying.dynamo import worker_words
from dflash_serve.deployment.description import Deployment

from .dynamo import ROOT, worker_folders
from .nixl import nixl_folders
from .sglang_pair import half
from .sglang_server import FORKED, PATIENCE, OnCpu, Server

PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
PAGE = 16  # Tokens of a page: the unit of K/V events
MIGRATIONS = 3  # Workers that a stream is tried on after its first one


def environment(store: Path) -> dict[str, str]:
    """Variables of all processes that meet in this folder."""
    path = os.pathsep.join([*map(str, worker_folders()), os.environ.get("PYTHONPATH", f"{ROOT}:{ROOT}/backends")])
    return {"PYTHONPATH": path, "DYN_FILE_KV": str(store), "DYN_LOG": "info"}


class DynamoWorker(OnCpu):
    """The command line of `serve`, as `deploy --render dynamo` gives it to Dynamo's worker.

    Args:
        modules: folders of Python modules that it needs besides.
    """

    def __init__(self, store: Path, model: str, modules: Sequence[str] = ()) -> None:
        self.system_port, events = _low_port(), {"publisher": "zmq", "topic": "kv-events"}
        told = json.dumps({**events, "endpoint": f"tcp://127.0.0.1:{free_port()}"})
        self.served, self.words = model, (*PLANES, "--page-size", str(PAGE), "--kv-events-config", told)
        env = {**FORKED, **environment(store), "DYN_SYSTEM_PORT": str(self.system_port)}
        env["PYTHONPATH"] = os.pathsep.join([*modules, env["PYTHONPATH"]])
        super().__init__(env=env)


def dynamo_half(deployment: Deployment, role: str, meeting: int, store: Path) -> tuple[Deployment, DynamoWorker]:
    """A worker for `fleet` that is one half of a pair.

    Args:
        meeting: port where the halves meet.
    """
    described, _ = half(deployment, role, meeting)
    return described, DynamoWorker(store, "smollm2", nixl_folders())


@contextmanager
def serving_dynamo(folder: Path, deployment: Deployment, worker: DynamoWorker) -> Iterator[Server]:
    """A worker that is ready; its address is that of its system port, which has its metrics and no answers."""
    launch = worker.launch(deployment)
    folder.mkdir(parents=True, exist_ok=True)
    launch.prepare(folder)
    command, url = launch.command(folder), f"http://127.0.0.1:{worker.system_port}"
    words = (*worker_words("sglang", command.argv, deployment.role, worker.served), *worker.words)
    argv, env = [sys.executable, "-m", "dynamo.sglang", *words], {**os.environ, **command.env}
    with running(argv, folder / "server.log", env=env, ready=f"{url}/health", patience=PATIENCE):
        yield Server(url, folder)


@contextmanager
def running_frontend(store: Path, folder: Path) -> Iterator[str]:
    """The address of a frontend that sends a prompt to the worker with its prefix, and moves lost workers' streams."""
    port = free_port()
    words = ("--router-mode", "kv", "--migration-limit", str(MIGRATIONS), "--kv-cache-block-size", str(PAGE))
    argv = [sys.executable, "-m", "dynamo.frontend", *PLANES, *words, "--http-port", str(port)]
    url, env = f"http://127.0.0.1:{port}", {**os.environ, "HF_HUB_OFFLINE": "1", **environment(store)}
    with running(argv, folder / "frontend.log", env=env, ready=f"{url}/live", patience=PATIENCE):
        yield url


def wait_for_workers(frontend: str, count: int) -> None:
    """Until the frontend knows so many workers that generate, and their model."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = _page(frontend, "/health").get("instances") or []
        ready = [one for one in found if one.get("endpoint") == "generate"]
        if len(ready) == count and _page(frontend, "/v1/models").get("data"):
            return
        time.sleep(0.5)
    raise AssertionError(f"the frontend does not know {count} workers: {_page(frontend, '/health')}")


def _page(url: str, path: str) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = httpx.get(url + path, trust_env=False, timeout=30).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return found


def _low_port() -> int:
    # Dynamo reads this port as a signed number of 16 bits
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no port below 32768 is free")

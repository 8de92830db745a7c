"""Routers before several servers, the real ones: SGLang's, its successor smg, and vLLM's, which have one command line.

A wheel has all that a router needs, and is unpacked into a folder of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_serve.common.processes import free_port

from .pinned_wheels import PinnedWheel, unpacked

SGLANG, SMG, VLLM = "sglang_router", "smg", "vllm_router"
"""Their Python packages."""
WHEELS = {
    SGLANG: PinnedWheel(
        "sglang-router",
        "0.3.2",
        "ba5a24951e5e0357fe390782fcd1abd861448a87216832dbf2e501a1dd1548eb",
        "manylinux2014_x86_64",
    ),
    SMG: PinnedWheel(
        "smg",
        "1.13.0",
        "cfae8171dac68a74b4822263b1864fa79952992ee472a25ba7266ccd200399b4",
        "manylinux2014_x86_64",
    ),
    VLLM: PinnedWheel(
        "vllm-router",
        "0.1.17",
        "85c96bea4d573a49b5a8ae4c72ee3dfe733aba26b6f1ff1256e6142f1f42694d",
        "manylinux_2_28_x86_64",
    ),
}
MACHINE = "linux", "x86_64"
PATIENCE_SECONDS = 60
LOOKS = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--health-success-threshold", "1"),
    "--disable-retries",
)
# What `python -m sglang_router.launch_router` does, without the packages of its second, Python-only balancer.
LAUNCH = """import argparse, importlib, sys
package = sys.argv.pop(1)
Router = importlib.import_module(f"{package}.router").Router
RouterArgs = importlib.import_module(f"{package}.router_args").RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=False)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()
"""


@contextmanager
def running_router(
    workers: Sequence[str], log: Path, *, policy: str = "round_robin", package: str = SGLANG
) -> Iterator[str]:
    """The address of a router before these workers."""
    words = ["--policy", policy, "--worker-urls", *workers]
    with _running(words, len(workers), log, package) as url:
        yield url


@contextmanager
def router_of_a_pair(prefill: str, bootstrap_port: int, decode: str, log: Path) -> Iterator[str]:
    """The address of a router before two halves, which looks at their health every second and asks once."""
    halves = ["--pd-disaggregation", "--prefill", prefill, str(bootstrap_port), "--decode", decode]
    with _running([*halves, *LOOKS], 2, log, SGLANG) as url:
        yield url


@contextmanager
def router_of_a_vllm_pair(prefill: str, decode: str, log: Path) -> Iterator[str]:
    """The address of vLLM's router before two halves, which asks the prefill half first and then the decode half."""
    halves = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
    with _running([*halves, *LOOKS], 2, log, VLLM) as url:
        yield url


@contextmanager
def _running(words: list[str], workers: int, log: Path, package: str) -> Iterator[str]:
    if (sys.platform, os.uname().machine) != MACHINE:
        pytest.skip("the router's wheel is for Linux on x86-64")
    port, env = free_port(), {**os.environ, "PYTHONPATH": str(unpacked(WHEELS[package]))}
    ports = ["--port", str(port), "--prometheus-port", str(free_port())]
    hosts = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
    command = [sys.executable, "-c", LAUNCH, package, *ports, *hosts, *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(f"http://127.0.0.1:{port}/readiness", workers, process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait(page: str, workers: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if _healthy(httpx.get(page, trust_env=False).json()) == workers:
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"the router did not become ready: {log.read_text(errors='replace')[-2000:]}")


def _healthy(told: dict[str, Any]) -> int | None:
    """Workers that answer; vLLM's router counts those of each kind where there are several kinds."""
    kinds = [told[kind]["healthy"] for kind in ("prefill", "decode") if kind in told]
    return sum(kinds) if kinds else told.get("healthy_workers")

"""SGLang's router, the real one: its wheel has all that it needs, and is unpacked into a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dflash_serve.common.processes import free_port

from .pinned_wheels import PinnedWheel, kept

WHEEL = PinnedWheel(
    "sglang-router",
    "0.3.2",
    "ba5a24951e5e0357fe390782fcd1abd861448a87216832dbf2e501a1dd1548eb",
    "manylinux2014_x86_64",
)
MACHINE = "linux", "x86_64"
PATIENCE_SECONDS = 60
# What `python -m sglang_router.launch_router` does, without the packages of its second, Python-only balancer.
LAUNCH = """import argparse
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=False)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()
"""


@contextmanager
def running_router(workers: Sequence[str], log: Path, *, policy: str = "round_robin") -> Iterator[str]:
    """The address of a router before these workers."""
    words = ["--policy", policy, "--worker-urls", *workers]
    with _running(words, len(workers), log) as url:
        yield url


@contextmanager
def router_of_a_pair(prefill: str, bootstrap_port: int, decode: str, log: Path) -> Iterator[str]:
    """The address of a router before two halves, which looks at their health every second and asks once."""
    looks = ("--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--health-success-threshold", "1")
    halves = ["--pd-disaggregation", "--prefill", prefill, str(bootstrap_port), "--decode", decode]
    with _running([*halves, *looks, "--disable-retries"], 2, log) as url:
        yield url


@contextmanager
def _running(words: list[str], workers: int, log: Path) -> Iterator[str]:
    if (sys.platform, os.uname().machine) != MACHINE:
        pytest.skip("the router's wheel is for Linux on x86-64")
    package = kept(f"{WHEEL.package}-{WHEEL.version}", WHEEL, lambda file, out: zipfile.ZipFile(file).extractall(out))
    port, env = free_port(), {**os.environ, "PYTHONPATH": str(package)}
    ports = ["--port", str(port), "--prometheus-port", str(free_port())]
    hosts = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
    command = [sys.executable, "-c", LAUNCH, *ports, *hosts, *words]
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
            if httpx.get(page, trust_env=False).json().get("healthy_workers") == workers:
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"the router did not become ready: {log.read_text(errors='replace')[-2000:]}")

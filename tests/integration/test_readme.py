"""README's quick start on the bundled pair, run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from dflash_serve.checkpoint.source import target_folder
from dflash_serve.errors import UserError
from tests.house import ROOT

pytestmark = [
    pytest.mark.model,
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("aiperf") is None, reason="pip install 'dflash-serve[bench]'"),
]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
(BLOCK,) = re.findall(r"^\$ source .venv/bin/activate\n((?:\$ .+\n)+)", TEXT, re.MULTILINE)
LINES = [line.removeprefix("$ ").partition("#")[0].strip() for line in BLOCK.splitlines()]
SERVE = next(line for line in LINES if line.endswith("&"))
END = "kill %1"
WITH_SERVER = [line for line in LINES[: LINES.index(END)] if line != SERVE]
ALONE = LINES[LINES.index(END) + 1 :]
URL = "http://localhost:8000"
PATIENCE = 900
"""Seconds for a line; on a quiet machine the longest takes six minutes."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after `source .venv/bin/activate`, in an empty folder, without a network."""
    try:
        target_folder("smollm2")
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)


def answered(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return bool(answer.status == 200)
    return False


@contextmanager
def served() -> Iterator[None]:
    """The line that serves, ready, and ended as Ctrl-C and `kill` end it."""
    assert not answered(f"{URL}/health"), "something else listens on port 8000"
    with subprocess.Popen(SERVE.removesuffix("&").split()) as server:
        try:
            deadline = time.monotonic() + PATIENCE
            while not answered(f"{URL}/ready"):
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.5)
            yield
        finally:
            server.terminate()


def run(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line.split(), capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_every_verb_of_the_quick_start_is_among_the_lines() -> None:
    verbs = {line.split()[1] for line in (SERVE, *WITH_SERVER, *ALONE)}
    assert verbs == {"serve", "top", "doctor", "verify", "bench", "plan", "certify"}


def test_the_bundled_pair_is_served_and_looked_at() -> None:
    with served():
        for line in WITH_SERVER:
            done = run(line)
            assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.mark.parametrize("line", ALONE, ids=lambda line: line.split()[1])
def test_what_needs_no_server_answers_on_the_bundled_pair(line: str) -> None:
    done = run(line)
    # A certificate says whether this machine, with its other users, is faster: any verdict is an answer.
    verdicts = {0, 1, 3} if line.split()[1] == "certify" else {0}
    assert done.returncode in verdicts, (line, done.stdout, done.stderr)
    assert done.stdout.strip()

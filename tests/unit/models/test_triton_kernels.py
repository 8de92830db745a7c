"""Triton's kernels are used on a GPU alone, and only if they give PyTorch's results there.

The kernels themselves are tested by `interpreted_kernels` and `compiled_kernels`, each in a process of its own: Triton
must be told to interpret, or not to, before anything imports it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from dflash_serve.models.attention import PlainOperators
from dflash_torch import engine
from dflash_torch.engine import gpu_operators
from tests.house import ROOT
from tests.support.tiny import tiny_drafter_config

MODULE = "dflash_serve.models.triton_kernels"
HERE, CUDA = Path(__file__).parent, torch.device("cuda")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (extra `dev`, on Linux)")
@pytest.mark.parametrize(
    ("tests", "interpret"),
    [
        pytest.param("interpreted_kernels.py", "1", marks=pytest.mark.thorough),
        ("compiled_kernels.py", "0"),
    ],
)
def test_the_kernels_themselves(tests: str, interpret: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"{HERE}/{tests}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_a_cpu_has_no_use_for_them() -> None:
    gpu_operators(tiny_drafter_config(), torch.float32, torch.device("cpu"))
    assert MODULE not in sys.modules


def no_compiler(*_: object) -> NoReturn:
    raise RuntimeError("`ptxas` failed\nand more lines")


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (lambda *_: "SwiGLU differs from PyTorch's", "SwiGLU differs"),
        (no_compiler, "`ptxas` failed"),
        (None, "import of triton halted"),
    ],
    ids=["differs", "not compiled", "not installed"],
)
def test_where_they_do_not_work_one_line_says_so(
    difference: Callable[..., str] | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if difference is None:
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(difference=difference))
    engine._say.cache_clear()
    for _ in ("target", "drafter"):
        assert gpu_operators(tiny_drafter_config(), torch.bfloat16, CUDA) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert said in caplog.text
    assert "more lines" not in caplog.text


def test_where_they_work_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(difference=lambda *_: None, TritonOperators=PlainOperators)
    monkeypatch.setitem(sys.modules, MODULE, fake)
    assert type(gpu_operators(tiny_drafter_config(), torch.bfloat16, CUDA)) is PlainOperators

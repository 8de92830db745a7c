"""Kernels compiled for other processors: they use their vector sizes, and are correct if they run here."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from dflash_serve.models import layers
from dflash_serve.models.compiled import build
from dflash_serve.models.compiled.build import SOURCES, find_compiler
from dflash_serve.models.layers import compiled_linear
from tests.support.linear_layers import assert_is_product

LEVELS = {
    "x86-64-v2": lambda: True,
    "x86-64-v3": torch.cpu._is_avx2_supported,
    "x86-64-v4": torch.cpu._is_avx512_supported,
}
"""Vectors of 4, 8 and 16 numbers, and whether this machine runs them."""


COMPILER = find_compiler() or ""
IS_GCC = bool(COMPILER) and "Free Software" in build._output(COMPILER, "--version")
pytestmark = pytest.mark.skipif(not IS_GCC or platform.machine() != "x86_64", reason="no GCC for x86-64")


def flags_for(level: str) -> tuple[str, ...]:
    assert "-march=native" in build.COMPILE
    return tuple(flag.replace("native", level) for flag in build.COMPILE)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("source", SOURCES)
def test_vectors_are_what_the_processor_has(source: str, level: str, tmp_path: Path) -> None:
    """Wider ones compile, too, and are ten times as slow: GCC keeps them in memory and says so only if asked."""
    path = Path(build.__file__).with_name(source)
    asked = "-O0", "-Wvector-operation-performance", "-Werror"
    argv = [COMPILER, *flags_for(level), *asked, str(path), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", LEVELS)
@torch.inference_mode()
def test_products_of_every_vector_length(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a block come out bit for bit as they do alone there, too."""
    if not LEVELS[level]():
        pytest.skip("not a processor for it")
    path = tmp_path / "kernels.so"
    monkeypatch.setenv("CXXFLAGS", f"-march={level}")
    monkeypatch.setattr(build, "SOURCES", {"linear.cpp": SOURCES["linear.cpp"]})
    build._build(COMPILER, path)
    monkeypatch.setattr(layers, "load_kernels", lambda: ctypes.CDLL(str(path)))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for dtype in (torch.float32, torch.bfloat16):
        for inputs, outputs in ((576, 960), (514, 47)):
            torch.manual_seed(0)
            plain = nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)
            ours = compiled_linear(plain)
            assert ours is not None
            for rows in range(1, 20):
                x = torch.randn(rows, inputs).to(dtype)
                out = ours(x)
                assert_is_product(out, plain, x)
                assert torch.equal(out[-1:], ours(x[-1:]))


def test_kernels_compiled_with_other_flags_are_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that plays a CPU without AVX-512 would load what was compiled with it."""
    monkeypatch.delenv("CXXFLAGS", raising=False)
    native = build._key(COMPILER)
    monkeypatch.setenv("CXXFLAGS", "-march=x86-64-v3")
    assert build._key(COMPILER) != native

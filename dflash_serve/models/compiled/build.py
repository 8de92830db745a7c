"""Compiles our C++ kernels for this machine; the library is cached under a digest of sources, compiler and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from dflash_serve.common.files import cache_home
from dflash_serve.common.progress import doing
from dflash_serve.common.provenance import processor

log = logging.getLogger(__name__)

SOURCES = {
    "small.cpp": ("-ffast-math",),
    "attention.cpp": ("-ffast-math",),
    "linear.cpp": ("-ffp-contract=fast",),
}
"""File -> its own compiler flags."""
HEADERS = "numbers.h", "vectors.h"
COMPILE = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-c")
"""The library is linked without -fopenmp, so that it uses the OpenMP and the threads that PyTorch has loaded, and
without -ffast-math, which would change the rounding of the whole process."""
SECONDS = 120  # timeout of one compiler run; compiling takes five seconds


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled library; None, and one log line with the reason, if it cannot be compiled."""
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler: PyTorch's own operators are used, which are slower")
        return None
    try:
        path = cache_home() / "kernels" / f"{_key(compiler)}.so"
        if not path.exists():
            _build(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("compiling our kernels failed: PyTorch's own operators are used (%s)", said.splitlines()[0])
        return None


def kernels_id() -> str:
    """Identity of the compiled library, or "plain"; measured step times hold for one library only."""
    library = load_kernels()
    return "plain" if library is None else Path(library._name).stem


class Kernel(Protocol):
    """A function of the library. It returns nothing, and does not check pointers and sizes."""

    def __call__(self, *arguments: float | None) -> None: ...


def kernel(library: ctypes.CDLL, name: str, signature: str) -> Kernel:
    """The kernel `name`; a letter for each argument: p = pointer, l = int64, f = float, i = int."""
    kinds: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
    function = library[name]
    function.argtypes, function.restype = [kinds[kind] for kind in signature], None
    return function


def find_compiler() -> str | None:
    """Path of the C++ compiler: $CXX, or the first that is installed of the usual ones; None = none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def _key(compiler: str) -> str:
    sources = [part for name, flags in SOURCES.items() for part in (_source(name).read_text(encoding="utf-8"), *flags)]
    parts = [
        *sources,
        *(_source(name).read_text(encoding="utf-8") for name in HEADERS),
        *COMPILE,
        *_added_flags(),
        _output(compiler, "--version"),
        processor(),
        torch.__version__,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _build(compiler: str, path: Path) -> None:
    # Renamed when complete, so that a process that starts at the same time never loads an incomplete library.
    path.parent.mkdir(parents=True, exist_ok=True)
    told = doing("compiling kernels for this CPU, once", len(SOURCES))
    with told as work, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled, library = [], Path(scratch) / "kernels.so"
        for name, flags in SOURCES.items():
            compiled.append(str(Path(scratch) / name) + ".o")
            _output(compiler, *COMPILE, *flags, *_added_flags(), str(_source(name)), "-o", compiled[-1])
            work.advance()
        _output(compiler, "-shared", *compiled, "-o", str(library))
        library.replace(path)


def _added_flags() -> list[str]:
    # As make and CMake take it: `CXXFLAGS=-march=x86-64-v3` compiles for a CPU without AVX-512.
    return shlex.split(os.environ.get("CXXFLAGS", ""))


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)


def _output(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=SECONDS)  # noqa: S603 - found on PATH
    return done.stdout

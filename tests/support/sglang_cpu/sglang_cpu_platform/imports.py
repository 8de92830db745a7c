"""Imports that would fail on a CPU: Triton (GPU compilers only) and torchvision's compiled operators."""

import importlib.abc
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

STUBS = "_platform_stubs.py"


def prepare_imports() -> None:
    """Lets `import sglang` succeed; costs nothing until then."""
    sys.meta_path.insert(0, _Before("torchvision", _define_torchvision_operators))
    sys.meta_path.insert(0, _Before("sglang", _stub_triton))


class _Before(importlib.abc.MetaPathFinder):
    """Does something before a module is first imported, and leaves the import itself to others."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == self.name:
            sys.meta_path.remove(self)
            self.action()


def _define_torchvision_operators() -> None:
    """torchvision from PyPI is a CUDA build; on import it describes operators which its library would have defined."""
    import torch

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _stub_triton() -> None:
    """SGLang carries a stand-in for Triton, for Apple silicon; it will do here too."""
    if importlib.util.find_spec("triton") is not None:
        return
    path = next(file for entry in sys.path if (file := Path(entry, "sglang", STUBS)).is_file())
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    with _pretending_to_be_a_mac():
        stubs.install_platform_stubs()


@contextmanager
def _pretending_to_be_a_mac() -> Iterator[None]:
    import torch

    with (
        patch.object(sys, "platform", "darwin"),
        patch.object(platform, "machine", lambda: "arm64"),
        patch.object(torch.backends.mps, "is_available", lambda: True),
    ):
        yield

"""Hardware facts without torch: by the real cuda-bindings where installed, and a stand-in where a driver must be."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dflash_torch import local_gpus as module
from dflash_torch.local_gpus import LocalGpu, local_gpus


def fake_nvml(gpus: int = 2) -> ModuleType:
    """cuda.bindings.nvml of cuda-bindings 13.5.0, as far as it is used."""
    fake = ModuleType("cuda.bindings.nvml")
    fake.InvalidArgumentError = type("InvalidArgumentError", (Exception,), {})  # type: ignore[attr-defined]
    fake.NotSupportedError = type("NotSupportedError", (Exception,), {})  # type: ignore[attr-defined]

    def link(handle: int, number: int) -> int:
        if number >= 6:
            raise fake.InvalidArgumentError
        return 1 if number < 4 else 0

    fake.__dict__.update(
        init_v2=lambda: None,
        shutdown=lambda: None,
        EnableState=SimpleNamespace(FEATURE_ENABLED=1),
        device_get_count_v2=lambda: gpus,
        device_get_handle_by_index_v2=lambda index: 1000 + index,
        device_get_name=lambda handle: f"NVIDIA B300 {handle}",
        device_get_cuda_compute_capability=lambda handle: (10, 3),
        device_get_memory_info_v2=lambda handle: SimpleNamespace(total=300, free=200),
        device_get_nvlink_state=link,
    )
    return fake


def test_what_the_driver_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", fake_nvml())
    assert local_gpus() == [LocalGpu(f"NVIDIA B300 {1000 + n}", 103, 300, 200, nvlinks=4) for n in (0, 1)]


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_nvml()

    def no_driver() -> None:
        raise RuntimeError("NVML is not to be found")

    monkeypatch.setattr(fake, "init_v2", no_driver)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", fake)
    assert local_gpus() == []


def test_without_the_extra_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)
    assert local_gpus() is None


def test_every_name_is_one_of_the_real_bindings() -> None:
    real = pytest.importorskip("cuda.bindings.nvml", reason="the extra [cuda] is not installed")
    tree = ast.parse(Path(module.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nvml"
    }
    assert len(used) > 8
    assert [name for name in sorted(used) if not hasattr(real, name)] == []
    assert real.EnableState.FEATURE_ENABLED == 1


def test_it_needs_no_torch() -> None:
    source = Path(module.__file__).read_text()
    assert "import torch" not in source

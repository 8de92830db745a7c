"""Memory of a deployment by arithmetic; GPUs through the installed cuda-bindings and a stand-in for a driver."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout
from dflash_serve.deployment import Model, load_deployment
from dflash_serve.models.loader import load_target
from dflash_torch import launch
from dflash_torch.launch import LocalGpu, local_gpus, memory_problems, needed_bytes


@pytest.fixture
def layout(folders: tuple[Path, Path]) -> TargetLayout:
    return read_target_layout(folders[0], Model(model="t"))


def test_the_arithmetic_is_that_of_the_real_tensors(folders: tuple[Path, Path], layout: TargetLayout) -> None:
    deployment = load_deployment(flags={"target": {"model": "t"}, "limits": {"max_batch_size": 3}})
    target = load_target(str(folders[0]))
    cache = target.new_cache(3, target.config.max_position_embeddings)
    real = sum(p.nbytes for p in target.parameters()) + cache.keys.nbytes + cache.values.nbytes
    assert needed_bytes(deployment, layout, None) == pytest.approx(real, rel=0.02)  # norms are not counted
    drafter, _ = read_config(folders[1])
    assert needed_bytes(deployment, layout, drafter) > needed_bytes(deployment, layout, None)


@pytest.mark.parametrize(("free", "problems"), [(10**12, 0), (10**4, 1), (None, 0)])
def test_what_does_not_fit_is_a_problem_where_that_is_known(
    layout: TargetLayout, monkeypatch: pytest.MonkeyPatch, free: int | None, problems: int
) -> None:
    monkeypatch.setattr(launch, "free_bytes", lambda: free)
    deployment = load_deployment(flags={"target": {"model": "t"}})
    assert len(memory_problems(deployment, layout, None)) == problems


def test_a_gpus_own_memory_decides_where_it_is_known(layout: TargetLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LocalGpu("NVIDIA H200", 90, memory=150 * 2**30, free=10**4, nvlinks=18)
    monkeypatch.setattr(launch, "local_gpus", lambda: [gpu])
    asked = {"target": {"model": "t"}}
    assert len(memory_problems(load_deployment(flags=asked), layout, None)) == 1
    assert memory_problems(load_deployment(flags={**asked, "hardware": {"gpu": "none"}}), layout, None) == []


def test_half_precision_is_the_default_on_a_gpu(layout: TargetLayout) -> None:
    deployment = load_deployment(flags={"target": {"model": "t"}})
    assert needed_bytes(deployment, layout, None) == 2 * needed_bytes(deployment, layout, None, on_gpu=True)


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
    tree = ast.parse(Path(launch.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nvml"
    }
    assert len(used) > 8
    assert [name for name in sorted(used) if not hasattr(real, name)] == []
    assert real.EnableState.FEATURE_ENABLED == 1


def test_it_needs_no_torch() -> None:
    source = Path(launch.__file__).read_text()
    assert "import torch" not in source

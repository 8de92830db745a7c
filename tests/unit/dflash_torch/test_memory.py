from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.checkpoint.reader import read_config
from dflash_serve.deployment import load_deployment
from dflash_serve.models.loader import load_target
from dflash_serve.models.target_config import read_target_config
from dflash_torch import memory
from dflash_torch.local_gpus import LocalGpu
from dflash_torch.memory import memory_problems, needed_bytes


def test_the_arithmetic_is_that_of_the_real_tensors(folders: tuple[Path, Path]) -> None:
    deployment = load_deployment(flags={"target": {"model": "t"}, "limits": {"max_batch_size": 3}})
    target = load_target(str(folders[0]))
    cache = target.new_cache(3, target.config.max_position_embeddings)
    real = sum(p.nbytes for p in target.parameters()) + cache.keys.nbytes + cache.values.nbytes
    assert needed_bytes(deployment, target.config, None) == pytest.approx(real, rel=0.02)  # norms are not counted
    drafter, _ = read_config(folders[1])
    assert needed_bytes(deployment, target.config, drafter) > needed_bytes(deployment, target.config, None)


@pytest.mark.parametrize(("free", "problems"), [(10**12, 0), (10**4, 1), (None, 0)])
def test_what_does_not_fit_is_a_problem_where_that_is_known(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, free: int | None, problems: int
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    deployment = load_deployment(flags={"target": {"model": "t"}})
    assert len(memory_problems(deployment, read_target_config(folders[0]), None)) == problems


def test_a_gpus_own_memory_decides_where_it_is_known(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = LocalGpu("NVIDIA H200", 90, memory=150 * 2**30, free=10**4, nvlinks=18)
    monkeypatch.setattr(memory, "local_gpus", lambda: [gpu])
    config = read_target_config(folders[0])
    asked = {"target": {"model": "t"}}
    assert len(memory_problems(load_deployment(flags=asked), config, None)) == 1
    assert memory_problems(load_deployment(flags={**asked, "hardware": {"gpu": "none"}}), config, None) == []


def test_half_precision_is_the_default_on_a_gpu(folders: tuple[Path, Path]) -> None:
    deployment, config = load_deployment(flags={"target": {"model": "t"}}), read_target_config(folders[0])
    assert needed_bytes(deployment, config, None) == 2 * needed_bytes(deployment, config, None, on_gpu=True)

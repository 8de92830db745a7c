"""Two tensor-parallel ranks, as processes of gloo: what fails on one at start-up fails on both, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes

FAILING = 1
"""The rank on which memory is short."""


def both_told(rank: int, folder: str, failing: str) -> None:
    """Measures costs on one of two ranks, and notes what it was told."""
    from dflash_sglang.plugin import startup
    from dflash_sglang.plugin.ranks import RankError, Ranks

    torch.set_num_threads(1)
    store: Any = vars(distributed)["FileStore"](f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = Ranks(SimpleNamespace(cpu_group=distributed.group.WORLD, world_size=2, rank_in_group=rank))

    @contextmanager
    def made_up_batch(*_: Any) -> Any:
        if rank == FAILING and failing == "batch":
            raise MemoryError("no memory for a batch")
        yield None

    def step(batch: Any, width: int) -> None:
        if failing == "table" or (rank == FAILING and failing == "step"):
            raise MemoryError("no memory for a step")

    startup.made_up_batch = made_up_batch  # type: ignore[assignment]
    config = SimpleNamespace(context_len=512)
    runner = SimpleNamespace(max_running_requests=2, model_config=config)
    worker: Any = SimpleNamespace(model_runner=runner, device=torch.device("cpu"))
    try:
        if failing == "table":
            ranks.from_first("the cost table", lambda: step(None, 1))
        startup.measure(worker, [1, 4], step, ranks)
        told = "measured"
    except RankError as error:
        told = str(error)
    Path(folder, f"rank{rank}").write_text(told)
    distributed.destroy_process_group()


def one_waits(rank: int, folder: str, exchange: str) -> None:
    """Rank 0 comes to an exchange, rank 1 hangs somewhere else; notes what rank 0 was told."""
    from dflash_sglang.plugin import ranks as module

    module.PATIENCE = timedelta(seconds=2)
    store: Any = vars(distributed)["FileStore"](f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = module.Ranks(SimpleNamespace(cpu_group=distributed.group.WORLD, world_size=2, rank_in_group=rank))
    left = Path(folder, "told")
    if rank == 1:
        while not left.exists():
            time.sleep(0.05)
        return
    asked: dict[str, Callable[[], object]] = {
        "least": lambda: ranks.least(1.0),
        "together": lambda: ranks.together("width 4", lambda: None),
        "from_first": lambda: ranks.from_first("width 4", lambda: 1),
    }
    try:
        asked[exchange]()
    except RuntimeError as error:
        Path(folder, "partial").write_text(str(error))
    Path(folder, "partial").rename(left)


@pytest.mark.parametrize("exchange", ["least", "together", "from_first"])
def test_no_exchange_waits_without_limit_for_a_rank_that_hangs(tmp_path: Path, exchange: str) -> None:
    import dflash_sglang.plugin.startup  # once, before the fork

    assert dflash_sglang.plugin.startup
    start_processes(one_waits, (str(tmp_path), exchange), nprocs=2, start_method="fork")
    told = (tmp_path / "told").read_text()
    assert told.startswith("dflash-serve: ")
    assert "another rank did not come within 2 s; its log says where it failed or hangs" in told


@pytest.mark.parametrize(
    ("failing", "here", "there"),
    [
        ("batch", "a batch to time: another rank failed", "a batch to time: no memory for a batch"),
        ("step", "a timed step: another rank failed", "a timed step: no memory for a step"),
        ("table", "the cost table: no memory for a step", "the cost table: another rank failed"),
        ("nothing", "measured", "measured"),
    ],
)
def test_costs_are_measured_on_all_ranks_or_on_none(tmp_path: Path, failing: str, here: str, there: str) -> None:
    start = time.monotonic()
    import dflash_sglang.plugin.startup  # once, before the fork: SGLang takes seconds to import

    assert dflash_sglang.plugin.startup
    start_processes(both_told, (str(tmp_path), failing), nprocs=2, start_method="fork")
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [here, there]
    assert time.monotonic() - start < 60

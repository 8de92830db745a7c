"""Choices made before PyTorch is loaded: memory, by arithmetic, and the way in which threads wait."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout
from dflash_serve.cli import serve
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_target
from dflash_torch import launch
from dflash_torch.backend import backend
from dflash_torch.launch import (
    SPINS,
    Memory,
    choose_waiting,
    free_bytes,
    memory_here,
    memory_problems,
    needed_bytes,
)


def deployment(model: object = "t", **sections: Any) -> Deployment:
    return load_deployment(flags={"target": {"model": str(model)}, **sections})


@pytest.fixture
def layout(folders: tuple[Path, Path]) -> TargetLayout:
    return read_target_layout(folders[0], Model(model="t"))


def test_the_arithmetic_is_that_of_the_real_tensors(folders: tuple[Path, Path], layout: TargetLayout) -> None:
    asked = deployment(limits={"max_batch_size": 3})
    target = load_target(str(folders[0]))
    cache = target.new_cache(3, target.config.max_position_embeddings)
    real = sum(p.nbytes for p in target.parameters()) + cache.keys.nbytes + cache.values.nbytes
    assert needed_bytes(asked, layout, None) == pytest.approx(real, rel=0.02)  # norms are not counted
    drafter, _ = read_config(folders[1])
    assert needed_bytes(asked, layout, drafter) > needed_bytes(asked, layout, None)
    assert needed_bytes(asked, layout, None) == 2 * needed_bytes(asked, layout, None, on_gpu=True)  # in bfloat16


def sees_gpu(monkeypatch: pytest.MonkeyPatch, free: int | str) -> None:
    """PyTorch sees one GPU with so many free bytes; a text is its error instead."""

    def mem_get_info(device: object = None) -> tuple[int, int]:
        if isinstance(free, str):
            raise RuntimeError(free)
        return free, 10**15

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.fixture(params=[True, False], ids=["driver", "no driver"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """A machine with an NVIDIA driver, and one without."""
    monkeypatch.setattr(launch, "NVIDIA_DRIVER", tmp_path if request.param else tmp_path / "none")
    return bool(request.param)


@pytest.mark.parametrize(("free", "problems"), [(10**12, 0), (10**4, 1), (None, 0)])
def test_what_does_not_fit_is_a_problem_where_that_is_known(
    layout: TargetLayout, monkeypatch: pytest.MonkeyPatch, driver: bool, free: int | None, problems: int
) -> None:
    """Where a GPU may be used, its own memory counts, which a command without PyTorch does not know."""
    monkeypatch.setattr(launch, "free_bytes", lambda: free)
    for gpu, known in (("none", True), (None, not driver)):
        asked = deployment(hardware={"gpu": gpu})
        assert len(memory_problems(asked, layout, None, memory_here(asked))) == (problems if known else 0)
    assert len(memory_problems(asked, layout, None, Memory(10**4, on_gpu=True))) == 1


@pytest.mark.parametrize(
    ("share", "on_gpu", "batch"),
    [(None, False, 32), (33.0, False, 32), (3.0, False, 2), (0.0, False, 1), (200.0, True, 128), (70.0, True, 64)],
)
def test_an_open_number_of_requests_is_a_power_of_two_that_fits(
    folders: tuple[Path, Path],
    layout: TargetLayout,
    monkeypatch: pytest.MonkeyPatch,
    driver: bool,
    share: float | None,
    on_gpu: bool,
    batch: int,
) -> None:
    """By the memory of the device that PyTorch chooses. `share`: in K/V caches of one request, beside weights.

    On a CPU a quarter of what the weights leave is enough for them.
    """
    asked = deployment(folders[0], hardware={"gpu": None if on_gpu else "none"})
    one, two = (needed_bytes(asked, layout, None, on_gpu=on_gpu, batch=count) for count in (1, 2))
    weights, request = 2 * one - two, two - one
    if share is None:
        free = None
    elif on_gpu:
        free = int((weights + share * request) / 0.8)
    else:
        free = weights + int(4 * share * request)
    monkeypatch.setattr(launch, "free_bytes", lambda: 10**4 if on_gpu else free)
    sees_gpu(monkeypatch, 10**4 if free is None or not on_gpu else free)
    assert backend.launch(asked).with_batch_size().limits.max_batch_size == batch
    given = deployment(folders[0], limits={"max_batch_size": 5})
    assert backend.launch(given).with_batch_size() is given


V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
CONTAINERS = {
    "v2": ("0::/pod/mine", "pod", "memory.max", "memory.current", "inactive_file"),
    "v1": ("4:cpu,memory:/pod/mine", "memory/pod", *V1),
    "v1, its own group is the root": ("4:memory:/host/pod", "memory", *V1),
}


@pytest.mark.parametrize("limit", ["2000000", "max", str(2**63 - 4096)])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, container: str, limit: str) -> None:
    """Cached files count as free, as in the machine's own figure."""
    line, group, *names = CONTAINERS[container]
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    folder = tmp_path / "cgroups" / group
    folder.mkdir(parents=True)
    texts = limit, "500000", f"{names[2]} 100000\nactive_file 7"
    for name, text in zip((*names[:2], "memory.stat"), texts, strict=True):
        (folder / name).write_text(text + "\n")
    left = free_bytes(tmp_path, tmp_path / "cgroups")
    assert left == (2_000_000 - 400_000 if limit == "2000000" else 5000 * 1024)
    assert free_bytes(tmp_path, tmp_path / "no cgroups") == 5000 * 1024
    assert free_bytes(tmp_path / "nowhere") is None


def test_a_gpu_that_does_not_tell_its_memory_is_a_problem_that_names_the_key(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sees_gpu(monkeypatch, "CUDA error: no permission")
    with pytest.raises(UserError, match=r"limits\.max_batch_size: .*no permission.*give the number of requests"):
        backend.engine(deployment(folders[0]))


def test_a_prepared_folder_leaves_an_open_number_to_the_machine_that_serves(
    folders: tuple[Path, Path], driver: bool, tmp_path: Path
) -> None:
    """An init container, or a command without PyTorch, does not know the server's GPU."""
    asked = deployment(folders[0])
    backend.launch(asked).prepare(tmp_path / "prepared")
    written = (tmp_path / "prepared" / "deployment.json").read_text()
    assert Deployment.model_validate_json(written).limits.max_batch_size is None
    chosen = {choice.key: choice for choice in backend.launch(asked).choices}["limits.max_batch_size"]
    assert chosen.value == ("as many as fit" if driver else "32")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """Number of times that Python opens each file."""
    read: Counter[Path] = Counter()
    opened: Callable[..., Any] = io.open

    def counting(file: Any, *args: Any, **more: Any) -> Any:
        read.update([Path(file)] if isinstance(file, str | os.PathLike) else [])
        return opened(file, *args, **more)

    monkeypatch.setattr(io, "open", counting)
    monkeypatch.setattr("builtins.open", counting)
    return read


def test_serve_reads_drafter_and_weights_once_before_it_becomes_the_server(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Counter[Path]
) -> None:
    """Its server reads them again: only files and variables go through exec."""
    monkeypatch.setattr(serve, "become", lambda *_: None)
    target, drafter = folders
    words = ["serve", "--target", str(target), "--drafter", str(drafter), "--folder", str(tmp_path / "prepared")]
    told = CliRunner().invoke(app, words)
    assert told.exception is None, told.output
    weights = "model.safetensors"
    once = (drafter / "config.json", drafter / weights, target / "config.json", target / weights)
    assert [read[path] for path in once] == [1, 1, 1, 1]


def test_an_engine_reads_its_drafters_description_once(folders: tuple[Path, Path], read: Counter[Path]) -> None:
    target, drafter = folders
    described = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}
    backend.engine(Deployment.model_validate({**described, "limits": {"max_batch_size": 2}}))
    assert read[drafter / "config.json"] == 1


@pytest.mark.parametrize(
    ("later", "given", "expected"),
    [
        ("500 0 100 9020 20", {}, {"GOMP_SPINCOUNT": SPINS}),  # quiet
        ("501 0 100 9019 20", {}, {"GOMP_SPINCOUNT": SPINS}),
        ("505 0 100 9015 20", {}, {"OMP_WAIT_POLICY": "PASSIVE"}),  # busy
        ("520 0 100 9000 20", {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ("500 0 100 9000 20", {}, {}),  # the clock stood still
        ("", {}, {}),
        ("500 0 100 9020 20", {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),  # a user's choice
        ("500 0 100 9020 20", {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_threads_spin_on_a_quiet_machine_unless_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  500 0 100 9000 20 0 0 0 0 0\ncpu0 250 0 50 4500 10 0 0 0 0 0\n")
    monkeypatch.setattr(launch, "sleep", lambda _: stat.write_text(f"cpu  {later} 0 0 0 0 0\n" if later else ""))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment = dict(given)
    choose_waiting(environment, stat)
    assert environment == expected
    for too_late in (tmp_path / "none", stat):
        environment = {}
        choose_waiting(environment, too_late)
        assert environment == {}
        monkeypatch.setitem(sys.modules, "torch", object())


def test_engine_and_server_choose_before_they_load_pytorch(tmp_path: Path) -> None:
    """In a fresh process: `LLM` as `dflash-serve generate` has it; the server loads PyTorch long before the engine."""
    engine = (
        "import os; from dflash_serve import LLM; LLM('smollm2', None, max_model_len=64, max_batch_size=1); "
        "print(*[n for n in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT') if n in os.environ])"
    )
    server = (
        "import sys; from dflash_torch.server import __main__ as server; from dflash_torch import launch\n"
        "def choose():\n    print('torch' in sys.modules); raise SystemExit\n"
        "server.choose_waiting = choose; server.main()"
    )
    (deployment := tmp_path / "deployment.json").write_text('{"target": {"model": "smollm2"}}')
    kept = {name: value for name, value in os.environ.items() if name not in launch.CHOSEN_ALREADY}
    said = [
        subprocess.run(
            [sys.executable, "-c", code, deployment], capture_output=True, text=True, check=False, env=kept
        ).stdout
        for code in (engine, server)
    ]
    assert said[0].split()[-1] in launch.CHOSEN_ALREADY
    assert said[1] == "False\n"

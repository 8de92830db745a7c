"""The embedded engine's threads wait in the way that suits the machine's load before PyTorch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_torch import waiting
from dflash_torch.waiting import SPINS, choose_waiting

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A /proc/stat of two cores whose next tenth of a second is known; and no PyTorch in this process."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def made(*, busy: int, idle: int) -> Path:
        stat = tmp_path / "stat"
        stat.write_text("cpu  500 0 100 9000 20 0 0 0 0 0\ncpu0 250 0 50 4500 10 0 0 0 0 0\n")
        later = f"cpu  {500 + busy} 0 100 {9000 + idle} 20 0 0 0 0 0\n"
        monkeypatch.setattr(waiting, "sleep", lambda _: stat.write_text(later))
        return stat

    return made


@pytest.mark.parametrize(
    ("busy", "idle", "expected"),
    [
        (0, 20, {"GOMP_SPINCOUNT": SPINS}),
        (1, 19, {"GOMP_SPINCOUNT": SPINS}),
        (5, 15, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (20, 0, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (0, 0, {}),  # the clock stood still
    ],
)
def test_threads_spin_on_a_quiet_machine(machine: Machine, busy: int, idle: int, expected: dict[str, str]) -> None:
    environment: dict[str, str] = {}
    choose_waiting(environment, machine(busy=busy, idle=idle))
    assert environment == expected


@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_chose_is_left_alone(machine: Machine, given: dict[str, str]) -> None:
    environment = dict(given)
    choose_waiting(environment, machine(busy=0, idle=20))
    assert environment == given


@pytest.mark.usefixtures("machine")
def test_nothing_is_chosen_where_nothing_is_known(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    choose_waiting(environment, tmp_path / "none")
    (tmp_path / "odd").write_text("")
    choose_waiting(environment, tmp_path / "odd")
    assert environment == {}


def test_it_is_too_late_once_pytorch_is_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = machine(busy=0, idle=20)
    monkeypatch.setitem(sys.modules, "torch", object())
    environment: dict[str, str] = {}
    choose_waiting(environment, stat)
    assert environment == {}


def test_the_engine_looks_before_it_loads_pytorch() -> None:
    """In a fresh process, as `dflash-serve generate` has it: whatever it chose, it chose one."""
    program = (
        "import os; from dflash_serve import LLM; LLM('smollm2', None, max_model_len=64, max_batch_size=1); "
        "print(*[n for n in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT') if n in os.environ])"
    )
    kept = {name: value for name, value in os.environ.items() if name not in waiting.CHOSEN_ALREADY}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=kept)
    assert done.stdout.split()[-1] in waiting.CHOSEN_ALREADY


def test_the_server_looks_before_it_loads_pytorch() -> None:
    """It loads PyTorch with its handlers, long before the engine."""
    program = (
        "import os, sys; from dflash_torch.server import __main__ as server; from dflash_torch import waiting\n"
        "def choose():\n    waiting.choose_waiting(); print('torch' in sys.modules); raise SystemExit\n"
        "server.choose_waiting = choose; server.serve(None, None, [], None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr

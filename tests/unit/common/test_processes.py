"""Servers and commands that we start come up, are told apart from those that fail, and never outlive us."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash_serve.backend import Command
from dflash_serve.common.http import page_status
from dflash_serve.common.processes import run_command, running_server
from dflash_serve.deployment import Deployment, Model
from dflash_serve.errors import UserError
from tests.unit.bench.test_runner import BROKEN, Fake

DEPLOYMENT = Deployment(target=Model(model="a"))


def test_a_server_is_there_when_it_is_ready_and_gone_afterwards(tmp_path: Path) -> None:
    with running_server(Fake(), DEPLOYMENT, tmp_path / "a") as url:
        assert page_status(f"{url}/ready") == 200
    assert page_status(f"{url}/ready") is None
    assert (tmp_path / "a" / "server.log").exists()


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    said = r"server\.log: the server ended with exit code 2: loading \| dflash-serve: the GPU has no memory left"
    with pytest.raises(UserError, match=said), running_server(Fake(BROKEN), DEPLOYMENT, tmp_path):
        pass


def test_a_server_that_is_not_ready_in_time_is_stopped(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    slow = Fake(f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    with (
        pytest.raises(UserError, match=r"not ready after 2 s"),
        running_server(slow, DEPLOYMENT, tmp_path / "a", patience=2),
    ):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_command_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    class Missing(Fake):
        def command(self, *_: object, **__: object) -> Command:
            return Command(("/no/such/engine",))

    with (
        pytest.raises(UserError, match=r"/no/such/engine: cannot be started .*install what the backend needs"),
        running_server(Missing(), DEPLOYMENT, tmp_path),
    ):
        pass


def test_a_commands_exit_code_output_and_environment(tmp_path: Path) -> None:
    code = "import os; print(sorted(k for k in os.environ if k != 'LC_CTYPE')); raise SystemExit(3)"
    assert run_command([sys.executable, "-c", code], tmp_path / "log", env={"ONE": "1"}) == 3
    assert (tmp_path / "log").read_text() == "['ONE']\n"

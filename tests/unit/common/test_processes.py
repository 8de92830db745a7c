"""A started server becomes ready, or an error says why not, and none of its processes remains."""

from __future__ import annotations

import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import Command, Launch, PreparedFile, ServerBackend
from dflash_serve.checkpoint.config import Heads
from dflash_serve.common import processes
from dflash_serve.common.http import page_status
from dflash_serve.common.processes import sigterm_interrupts
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem, UserError
from dflash_torch.facts import FACTS
from tests.support.serving import until

DESCRIBED = Deployment.model_validate({"target": {"model": "any"}})
LOADING = """
    import http.server, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        asked = 0
        def do_GET(self):
            Handler.asked += 1
            self.send_response(200 if self.path == "/ready" and Handler.asked > 2 else 503)
            self.end_headers()
        def log_message(self, *_):
            pass
    print("listening")
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Ready when it is asked for the third time."""
NEVER = "import time; print('still loading', flush=True); time.sleep(600)"
STUBBORN = (
    """
    import signal, subprocess, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("children", "w").write(f"{child.pid}")
"""
    + LOADING
)
"""Does not go on SIGTERM, and has a child."""


@dataclass(frozen=True, kw_only=True)
class FakeLaunch(Launch):
    """Its server is a program for an executable."""

    executable: str
    program: str

    @property
    def problems(self) -> list[Problem]:
        return []

    def files(self, folder: Path) -> list[PreparedFile]:
        return []

    def prepare(self, folder: Path) -> None:
        (folder / "prepared").write_text(self.deployment.target.model)

    def command(self, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        code = f"import os; os.chdir({str(folder)!r})\n{self.program}"
        return Command((self.executable, "-c", code, str(port)), {"COLOUR": "blue"})


class FakeBackend(ServerBackend):
    """Its server is a small program, which finds its port in its first argument."""

    name, releases, untried = "fake", "1.0", ()
    facts = FACTS

    def __init__(self, program: str, *, executable: str = sys.executable) -> None:
        self.program, self.executable = textwrap.dedent(program), executable

    def head_problems(self, heads: Heads) -> list[Problem]:
        return []

    def launch(self, deployment: Deployment) -> Launch:
        return FakeLaunch(deployment=deployment, executable=self.executable, program=self.program)


def alive(process: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_url_is_given_once_the_server_is_ready_and_nothing_answers_there_afterwards(tmp_path: Path) -> None:
    with running_server(FakeBackend(LOADING), DESCRIBED, tmp_path / "new") as url:
        assert page_status(f"{url}/ready") == 200
    assert page_status(f"{url}/ready", timeout=2) is None
    assert (tmp_path / "new" / "prepared").read_text() == "any"


def test_it_is_stopped_where_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), running_server(FakeBackend(LOADING), DESCRIBED, tmp_path) as url:
        raise ValueError("mine")
    assert page_status(f"{url}/ready", timeout=2) is None


def test_its_environment_is_ours_with_the_commands_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPE", "round")
    program = "import os; raise SystemExit(os.environ['SHAPE'] + ' and ' + os.environ['COLOUR'])"
    with pytest.raises(UserError, match="round and blue"), running_server(FakeBackend(program), DESCRIBED, tmp_path):
        pass


def test_a_server_that_ends_by_itself_is_one_clear_line_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = "for line in range(9): print('line', line)\nprint()\nraise SystemExit('no memory left')"
    with pytest.raises(UserError) as failed, running_server(FakeBackend(program), DESCRIBED, tmp_path):
        pass
    message = str(failed.value)
    assert "ended with exit code 1: line 5 | line 6 | line 7 | line 8 | no memory left" in message
    assert str(tmp_path / "server.log") in message
    assert "\n" not in message


def test_a_server_that_is_never_ready_is_given_up_and_stopped(tmp_path: Path) -> None:
    program = f"import os; open('pid', 'w').write(str(os.getpid()))\n{NEVER}"
    with (
        pytest.raises(UserError, match=r"not ready after 2 s: still loading"),
        running_server(FakeBackend(program), DESCRIBED, tmp_path, patience=2),
    ):
        pass
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_program_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    nothing = FakeBackend("", executable=str(tmp_path / "nothing"))
    said = pytest.raises(UserError, match=r"nothing: not installed in this environment")
    with said, running_server(nothing, DESCRIBED, tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()


def test_what_does_not_go_on_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    with running_server(FakeBackend(STUBBORN), DESCRIBED, tmp_path) as url:
        child = int((tmp_path / "children").read_text())
        assert alive(child)
    until(lambda: not alive(child))
    assert page_status(f"{url}/ready", timeout=2) is None


def test_sigterm_is_an_interrupt_within_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before

"""`top` on a real server, and commands as processes: in a real terminal, and in a pipe that is not read to its end."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from dflash_serve.cli import main
from dflash_serve.cli.main import CLOSED_PIPE, app
from tests.support.caches import own_cache
from tests.support.embedded import tiny_engine
from tests.support.serving import MODEL, Running, running
from tests.support.site import site, usage_only
from tests.support.tiny_target import write_tiny_pair
from tests.unit.client.test_metrics import OURS

COMMAND = [sys.executable, "-c", "from dflash_serve.cli.main import run; run()"]
LONG = {"model": MODEL, "prompt": [9, 8, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
PATIENCE = 120
"""Seconds; a busy machine takes a while to start Python."""


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[Running]:
    with running(tiny_engine(pair, width=4)) as server:
        yield server


class Terminal:
    """A child with a terminal of its own, of 24 lines."""

    def __init__(self, *words: str, columns: int = 80) -> None:
        ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm-256color", "LINES": "24", "COLUMNS": str(columns)}
        # A shell starts what runs in its background with Ctrl-C ignored, and that is inherited.
        heed: Any = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        streams: Any = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.child = subprocess.Popen([*COMMAND, *words], **streams, env=env, preexec_fn=heed)
        os.close(theirs)
        self.screen, self.seen = ours, ""

    def until(self, text: str) -> None:
        """Reads what it writes until that stands on the screen."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.read(1.0)

    def read(self, seconds: float) -> bool:
        """Whether there may be more."""
        if not select.select([self.screen], [], [], seconds)[0]:
            return True
        try:
            found = os.read(self.screen, 65536)
        except OSError:  # Linux' way to say that the child has closed its end
            return False
        self.seen += found.decode(errors="replace")
        return bool(found)

    def end(self) -> int:
        """Its exit code; `seen` is then all that it wrote."""
        deadline = time.monotonic() + PATIENCE
        while self.read(1.0):
            assert time.monotonic() < deadline, self.seen
        os.close(self.screen)
        return self.child.wait(PATIENCE)


@pytest.fixture
def busy(server: Running) -> Iterator[str]:
    """The server's address, while one user asks without a pause."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE)

    user = threading.Thread(target=ask)
    user.start()
    yield server.url
    over.set()
    user.join(PATIENCE)


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--max-batch-size", "0"], 2), (["--width", "x"], 2)])
def test_a_full_disk_under_stderr_ends_no_command_and_changes_no_exit_code(
    words: list[str], code: int, pair: tuple[Path, Path]
) -> None:
    with Path("/dev/full").open("w") as full:
        asked = [*COMMAND, "serve", "--target", str(pair[0]), "--dry-run", *words]
        ended = subprocess.run(asked, stdout=subprocess.PIPE, stderr=full, check=False)
    assert ended.returncode == code
    assert (b"no problem found" in ended.stdout) == (code == 0)


def test_top_draws_one_page_in_a_terminal_and_gives_the_screen_back(busy: str) -> None:
    terminal = Terminal("top", "--url", busy, "--interval", "0.3")
    for word in ("acceptance", "tokens/s", "users", "in the queue", "K/V cache", "survival", "slot 3", "% of steps"):
        terminal.until(word)
    terminal.child.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "\x1b[?1049h" in terminal.seen, "the other screen"
    assert terminal.seen.rindex("\x1b[?1049l") > terminal.seen.rindex("\x1b[?1049h"), "what was there before is back"
    assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l"), "and the cursor"
    assert "Traceback" not in terminal.seen


def test_top_in_a_terminal_survives_a_server_that_goes_away(tmp_path: Path) -> None:
    with running(tiny_engine(write_tiny_pair(tmp_path), width=4)) as server:
        terminal = Terminal("top", "--url", server.url, "--interval", "0.2")
        terminal.until("tokens/s")
    terminal.until("no answer")
    terminal.child.send_signal(signal.SIGINT)
    assert terminal.end() == 0


def test_top_once_is_one_json_object_even_in_a_terminal(busy: str) -> None:
    terminal = Terminal("top", "--url", busy, "--once", "--json", "--interval", "1")
    assert terminal.end() == 0
    figures = json.loads(terminal.seen)
    assert figures["engine"] == "dflash-serve"
    assert figures["tokens_per_second"] > 0
    assert 1 <= figures["acceptance_length"] <= 4
    assert len(figures["survival"]) == 3
    assert sum(figures["widths"].values()) == pytest.approx(1)
    assert figures["queued"] == 0
    assert figures["running"] in (0, 1)


def test_top_of_a_server_that_does_nothing_says_unknown_and_not_nought(server: Running) -> None:
    result = CliRunner().invoke(app, ["top", "--url", server.url, "--once", "--json", "--interval", "0.1"])
    figures = json.loads(result.output)
    assert (figures["acceptance_length"], figures["widths"], figures["tokens_per_second"]) == (None, None, 0)


def test_top_of_no_server_or_of_one_without_metrics_is_one_line() -> None:
    with site(lambda *_: (404, "")) as url:
        assert "shows no metrics of an engine" in str(
            CliRunner().invoke(app, ["top", "--url", url, "--once"]).exception
        )
    assert "no answer" in str(CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9", "--once"]).exception)


def test_top_asks_a_server_without_metrics_where_it_is_told_to(server: Running) -> None:
    with usage_only(server.url) as url:
        result = CliRunner().invoke(app, ["top", "--url", url, "--once", "--json", "--probe"])
    figures = json.loads(result.output)
    assert figures["engine"] == "own requests"
    assert 1 <= figures["acceptance_length"] <= 4
    assert figures["tokens_per_second_per_user"] > 0
    assert (figures["tokens_per_second"], figures["widths"], figures["survival"]) == (None, None, [])


def test_a_probe_that_would_tell_nothing_is_one_line() -> None:
    reply = {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}}
    with site(lambda path, *_: (200, {"data": [{"id": "m"}]} if path == "/v1/models" else reply)) as url:
        asked = ["top", "--url", url, "--probe"]
        assert "no accepted_prediction_tokens" in str(CliRunner().invoke(app, asked).exception)
        assert "--probe: " in str(CliRunner().invoke(app, [*asked, "--metrics-url", url]).exception)


def test_top_once_of_a_server_that_goes_away_is_no_success() -> None:
    pages = iter([(200, OURS), (500, "")])
    with site(lambda path, *_: next(pages) if path == "/metrics" else (404, "")) as url:
        result = CliRunner().invoke(app, ["top", "--url", url, "--once", "--interval", "0.1"])
    assert "HTTP 500" in str(result.exception)


def test_an_address_with_brackets_is_shown_whole() -> None:
    with site(lambda *_: (200, OURS)) as url:
        assert f"{url}/[fd00::1]" in CliRunner().invoke(app, ["top", "--url", f"{url}/[fd00::1]", "--once"]).output


def test_what_an_encoding_lacks_is_written_as_an_escape() -> None:
    """A terminal in Latin-1 has no τ."""
    code = (
        "import typer; from dflash_serve.cli import main; main.app = typer.Typer(); main.app.callback()(lambda: None)"
    )
    code += "; main.app.command('say')(lambda: print('τ ä')); main.run()"
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code, "say"], env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "\\u03c4 ä\n".encode("latin-1"))


PIPED = {
    "help": ["--help"],
    "a verb's help": ["bench", "-h"],
    "inspect": ["inspect", "smollm2"],
    "inspect --json": ["inspect", "smollm2", "--json"],
    "build --dry-run": ["build", "smollm2", "--dry-run"],
    "serve --dry-run": ["serve", "--dry-run", "--target", "{target}", "--drafter", "{drafter}", "--backend", "sglang"],
}


def in_a_pipe(*words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def stop_reading(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it says on stderr."""
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    said = child.stderr.read()
    return child.wait(PATIENCE), said


@pytest.mark.parametrize("case", PIPED)
def test_a_reader_that_has_seen_enough_is_no_traceback(case: str, pair: tuple[Path, Path]) -> None:
    """`| head -1`: the pipe is closed while the command still writes, or before it begins."""
    code, said = stop_reading(in_a_pipe(*(word.format(target=pair[0], drafter=pair[1]) for word in PIPED[case])))
    assert (code in (0, CLOSED_PIPE), said) == (True, "")


def test_top_that_goes_on_ends_with_its_reader(server: Running) -> None:
    child = in_a_pipe("top", "--url", server.url, "--json", "--interval", "0.1")
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["engine"] == "dflash-serve"
    assert stop_reading(child) == (CLOSED_PIPE, ""), "1 is a verdict of some verbs"


def test_evaluate_in_a_closed_pipe_has_done_its_work_and_says_nothing(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path)))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the quick brown fox"}\n')
    words = ["evaluate", "--task", f"own={tmp_path / 'prompts.jsonl'}", "--target", str(pair[0])]
    words += ["--drafter", str(pair[1]), "--max-tokens", "4", "--speed", "0", "--output", str(tmp_path / "out.json")]
    code, said = stop_reading(in_a_pipe(*words))
    assert code in (0, CLOSED_PIPE)
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    assert "own" in json.loads((tmp_path / "out.json").read_text())["tasks"]


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
NARROW = {
    "drafters": ["drafters", "Qwen/Qwen3-8B"],
    "inspect": ["inspect", "smollm2"],
    "serve": ["serve", "--target", "smollm2", "--drafter", "smollm2", "--dry-run"],
    "an error": ["inspect", "smollm2", "--block-size", "9", "--target", "no-such-folder/of/a/target"],
}


@pytest.mark.parametrize("case", NARROW)
def test_a_narrow_terminal_gets_lines_that_break_between_words(case: str) -> None:
    """Commands and paths stay whole, to be copied; what else is longer would be cut within a word."""
    terminal = Terminal(*NARROW[case], columns=60)
    terminal.end()
    lines = [ESCAPE.sub("", line).rpartition("\r")[2] for line in terminal.seen.replace("\r\n", "\n").split("\n")]
    wide = [line for line in lines if len(line) > 60]
    assert [line for line in wide if not any(word.startswith("/") for word in line.split()[:2])] == []
    assert sum(len(line) > 40 for line in lines) > 2


def test_an_interruption_while_the_verbs_are_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "dflash_serve", "--version"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "dflash-serve: interrupted\n")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("drafters",), "dflash_serve.cli.drafters.installed"),
        (("plan", "--target", "smollm2", "--gpu", "h100"), "dflash_serve.cli.plan.server_backend"),
        (("generate", "hello"), "dflash_serve.cli.answers.described_pair"),
        (("build", "smollm2", "--dry-run"), "dflash_engines.cli.make_steps"),
    ],
)
def test_a_verb_says_that_it_was_interrupted(
    words: tuple[str, ...], where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    monkeypatch.setattr("sys.argv", ["dflash-serve", *words])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert (ended.value.code, capsys.readouterr().err) == (130, "dflash-serve: interrupted\n")

"""Progress: one line that changes on a terminal, lines now and then in a log, and nothing where it is not asked for."""

from __future__ import annotations

import io
import sys
import time

import pytest

from dflash_serve.common import progress
from dflash_serve.common.progress import Work, doing, shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that work sees, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.001)
    return now


def until(lines: list[str], count: int) -> None:
    end = time.monotonic() + 20
    while len(lines) < count and time.monotonic() < end:
        time.sleep(0.001)


def test_a_log_gets_a_line_at_first_then_now_and_then_and_one_at_the_end(clock: list[float]) -> None:
    lines: list[str] = []
    with shown(log=lines.append):
        with doing("short"):
            pass
        with doing("asking", 10) as work:
            clock[0] += 4
            until(lines, 1)
            work.advance(2)
            clock[0] += progress.LINE_SECONDS
            work.part = "with penalties"
            until(lines, 2)
            clock[0] += 200
            until(lines, 3)
        assert len(lines) == 4
    assert lines == [
        "asking (0 of 10 done), 4 s so far",
        "asking (2 of 10 done): with penalties, 19 s so far, about 76 s left",
        "asking (2 of 10 done): with penalties, 4 min so far, about 15 min left",
        "asking: 4 min",
    ]
    with doing("later"):
        clock[0] += 1000
    assert len(lines) == 4, "works are shown after the block has ended"


def test_work_inside_other_work_is_shown_behind_it(clock: list[float]) -> None:
    lines: list[str] = []
    with shown(log=lines.append), doing("runs", 4, 1) as runs:
        clock[0] += 60
        until(lines, 1)
        runs.advance()
        with doing("starting the server"):
            clock[0] += progress.LINE_SECONDS
            until(lines, 2)
    assert lines[:2] == [
        "runs (1 of 4 done), 60 s so far",
        "runs (2 of 4 done): starting the server, 15 s so far, about 2 min left",
    ], "what an earlier run did took no time of this one"
    assert lines[2:] == ["starting the server: 15 s", "runs: 75 s"]


def test_work_that_fails_is_not_said_to_have_ended(clock: list[float]) -> None:
    lines: list[str] = []

    def load() -> None:
        with doing("loading"):
            clock[0] += 5
            until(lines, 1)
            raise ValueError("broken")

    with shown(log=lines.append), pytest.raises(ValueError, match="broken"):
        load()
    assert lines == ["loading, 5 s so far"]
    with shown(log=lines.append), doing("again"):
        clock[0] += 5
        until(lines, 2)
    assert lines[1:] == ["again, 5 s so far", "again: 5 s"], "what failed is under way no more"


def test_a_share_is_shown_in_percent_and_more_parts_than_expected_are_counted() -> None:
    training, steps = Work("training", 1.0, 0.25), Work("measuring", 3)
    training.done = 0.5
    steps.advance(5)
    assert (str(training), str(steps), steps.left) == ("training (50% done)", "measuring (5 done)", None)


@pytest.mark.parametrize(("quiet", "terminal"), [(True, True), (True, False), (False, True), (False, False)])
def test_stderr_shows_it_as_it_can(
    quiet: bool, terminal: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), io.StringIO()
    err.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    with shown(quiet=quiet), doing("measuring [costs]"):
        clock[0] += 5
        print("result")
        end = time.monotonic() + 20
        while not quiet and "so far" not in err.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert out.getvalue() == "result\n", "a result that is piped goes its own way"
    assert ("measuring [costs]" in err.getvalue()) == (not quiet)
    assert ("\x1b[" in err.getvalue()) == (terminal and not quiet)

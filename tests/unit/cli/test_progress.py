"""Progress of a long command where no terminal is."""

from __future__ import annotations

import threading

import pytest

from dflash_serve.cli import progress


def test_a_log_gets_a_line_now_and_then_and_nothing_if_it_shall_be_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    for quiet in (False, True):
        looked = threading.Semaphore(0)

        def describe(looked: threading.Semaphore = looked) -> str:
            looked.release()
            return "verifying [auto]: 3 of about 70 answers; 0.1 of 15 minutes"

        with progress.progress_shown(describe, quiet=quiet) as tell:
            tell("verify auto: 20 prompts")
            assert all(looked.acquire(timeout=60) for _ in range(4))
        lines = capsys.readouterr().err.splitlines()
        assert sorted(set(lines)) == ([] if quiet else ["verify auto: 20 prompts", describe()])
        assert len(lines) >= 3 or quiet

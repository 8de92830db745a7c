"""The command line, run in this process."""

from __future__ import annotations

import sys

import pytest

from dflash_serve.cli.main import run


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `dflash-serve ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["dflash-serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        run()
    return int(stopped.value.code or 0)

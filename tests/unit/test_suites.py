"""Suites of `make test`, `make test-all` and CI: each is a target, and one that would end too late is left out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.house import ROOT

CI = (ROOT / ".ci" / "run").read_text()
ROWS = [line.split(maxsplit=3) for line in re.findall(r"^[a-z-]+ +\d+ +\d+ +.+$", CI, re.MULTILINE)]
SUITES = [name for name, *_ in ROWS]
AVX_512 = "avx512f" in Path("/proc/cpuinfo").read_text().split()
MINUTES = [int(row[1 if AVX_512 else 2]) for row in ROWS]


def run(folder: Path, limit: str, fails: str = "", seconds: int = 0) -> tuple[int, list[str], str]:
    """Its exit code, the suites that it started and its last line, where every suite takes so long."""
    clock = folder / "clock"
    clock.write_text("0")
    later = f"echo $(($(cat {clock}) + {seconds})) > {clock}"
    commands = {"make": f'echo "$1" >> {folder}/started\n{later}\n[ "$1" != "{fails}" ]', "date": f"cat {clock}"}
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "MINUTES": limit}
    done = subprocess.run(["bash", ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, check=False)
    started = folder / "started"
    return done.returncode, started.read_text().split() if started.exists() else [], done.stdout.splitlines()[-1]


def test_all_suites_run_where_there_is_no_limit(tmp_path: Path) -> None:
    assert run(tmp_path, "all")[:2] == (0, SUITES)


def test_a_suite_that_would_not_end_in_time_is_left_out_and_named(tmp_path: Path) -> None:
    limit = sorted(MINUTES)[len(MINUTES) // 2]
    code, started, last = run(tmp_path, str(limit))
    fitting = [name for name, minutes in zip(SUITES, MINUTES, strict=True) if minutes <= limit]
    assert (code, started) == (0, fitting)
    left = [f"{name} ({minutes} minutes)" for name, minutes in zip(SUITES, MINUTES, strict=True) if minutes > limit]
    assert last == f"left out, to end within {limit} minutes: {','.join(left)}"


def test_a_machine_on_which_the_first_suite_takes_longer_than_its_row_starts_fewer(tmp_path: Path) -> None:
    first, second, *_ = MINUTES
    limit = 2 * first + second  # twice as slow, the second one no longer fits
    code, started, last = run(tmp_path, str(limit), seconds=2 * 60 * first)
    assert (code, started[:1]) == (0, SUITES[:1])
    assert SUITES[1] not in started
    assert f"{SUITES[1]} ({2 * second} minutes)" in last


@pytest.mark.parametrize("fails", SUITES)
def test_a_suite_that_fails_is_named_and_the_others_run_unless_it_is_the_first(tmp_path: Path, fails: str) -> None:
    code, started, last = run(tmp_path, "all", fails)
    assert (code, last) == (1, f"failed: {fails}")
    assert started == (SUITES[:1] if fails == SUITES[0] else SUITES)


def test_each_suite_is_a_target_and_every_push_runs_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert set(SUITES) <= targets
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yaml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["suite"] == ["lint types unit", *SUITES[1:]]
    (body,) = re.findall(r"^test:\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert set(re.findall(r"[\w-]+", body)) & targets == {"lint", "types", "unit", "test-chart", "test-servers"}

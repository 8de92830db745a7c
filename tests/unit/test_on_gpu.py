"""`benchmarks/on_gpu.py`: a lease's steps are run, limited and reported; rehearsed here at tiny sizes."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import on_gpu
from benchmarks.on_gpu import Lease, Step, Work
from dflash_serve.cli.main import app
from tests.support.tiny_target import write_tiny_pair


def visit(output: Path, *argv: str) -> tuple[int, dict[str, dict[str, object]]]:
    made = typer.Typer()
    made.command()(on_gpu.main)
    code = CliRunner().invoke(made, [*argv, "--output", str(output)]).exit_code
    report = json.loads((output / "report.json").read_text())
    return code, {step["step"]: step for step in report["steps"]}


def test_steps_are_limited_and_kept_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = (sys.executable, "-c")
    steps = [
        Step("good", (*python, f"open({str(tmp_path / 'good.json')!r}, 'w').write('{{\"a\": 1}}')"), 1.0),
        Step("bad", (*python, "raise SystemExit('no such GPU')"), 1.0),
        Step("endless", (*python, "import time; time.sleep(600)"), 0.1),
        Step("after", (*python, "pass"), 2.0),
    ]
    monkeypatch.setattr(Work, "steps", lambda work, lease: steps)
    monkeypatch.setattr(on_gpu, "LAST_SECONDS", 0.0)
    code, found = visit(tmp_path, "L1", "--seconds", "40")
    assert code == 1
    assert [each["outcome"] for each in found.values()][:2] == ["ok", "exit code 1"]
    assert str(found["endless"]["outcome"]).startswith("ended after")
    assert (found["good"]["result"], found["after"]["outcome"]) == ({"a": 1}, "ok")
    assert "no such GPU" in str(found["bad"]["log"])
    assert len((tmp_path / "table.txt").read_text().splitlines()) == 4


def test_the_embedded_engine_is_rehearsed_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pair = write_tiny_pair(tmp_path / "pair")
    named = ("--target", str(pair[0]), "--drafter", str(pair[1]))
    code, found = visit(tmp_path / "out", "L1", "--dry", "--seconds", "900", *named)
    outcomes = {name: each["outcome"] for name, each in found.items()}
    assert outcomes.pop("verify, width auto") == "exit code 3"  # a random drafter: no draft was accepted
    assert outcomes == dict.fromkeys(["bursts", "in flight", "answers", "training"], "ok")
    assert code == 1
    assert (tmp_path / "out" / "train" / "drafter" / "config.json").is_file()
    table = (tmp_path / "out" / "table.txt").read_text()
    assert table.count("auto / better") == 3


@pytest.mark.parametrize("lease", Lease)
@pytest.mark.parametrize("dry", [True, False])
def test_every_command_of_every_lease_exists(lease: Lease, dry: bool, tmp_path: Path) -> None:
    """Options are looked up in the commands' own help, so that a lease does not fail by a renamed one."""
    bring = tmp_path if lease is Lease.L3 else None
    for step in Work(500.0, tmp_path, dry, "smollm2", "smollm2", bring).steps(lease):
        if "pytest" in step.argv:
            assert all((on_gpu.ROOT / each).exists() for each in step.argv if each.startswith("tests/"))
            continue
        module = step.argv[2] if step.argv[1] == "-m" else None
        if module:
            made = typer.Typer()
            made.command()(import_module(module).main)
            command, given = get_command(made), list(step.argv[3:])
        else:
            group = get_command(app)
            command, given = group.commands[step.argv[3]], list(step.argv[4:])  # type: ignore[attr-defined]
        command.make_context(step.name, given)

"""`benchmarks/on_gpu.py`: a lease's steps are run, limited and reported; each is rehearsed here at tiny sizes."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from benchmarks import on_gpu
from benchmarks.on_gpu import Lease, Step, Work
from dflash_serve.cli.main import app
from dflash_serve.common.files import sha256
from dflash_serve.training.recipe import load_recipe
from tests.support import command_line
from tests.support.tiny_target import write_tiny_pair

Pair = tuple[str, ...]
Found = dict[str, dict[str, Any]]


def call(output: Path, *argv: object) -> Result:
    made = typer.Typer()
    made.command()(on_gpu.main)
    return CliRunner().invoke(made, [*map(str, argv), "--output", str(output)])


def visit(output: Path, *argv: object) -> tuple[int, Found]:
    """Exit code and steps. What is left fits through the way back: four files of 15 MB."""
    code = call(output, *argv).exit_code
    left = [path for path in output.rglob("*") if path.is_file()]
    assert len(left) <= 4
    assert max(path.stat().st_size for path in left) <= 15_000_000
    report = json.loads((output / "report.json").read_text())
    assert len(report["table"]) >= len(report["steps"])
    return code, {step["step"]: step for step in report["steps"]}


def in_this_process(step: Step, _folder: Path, _allowed: float) -> dict[str, Any]:
    """Runs a step of our command line: a process would load PyTorch first."""
    assert step.argv[: len(on_gpu.CLI)] == on_gpu.CLI
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as log:
        code = command_line.call(patch, *step.argv[len(on_gpu.CLI) :])
    outcome = f"exit code {code}" if code else "ok"
    return {"step": step.name, "outcome": outcome, "seconds": 0.0, "log": log.getvalue()}


def rehearsed(lease: str, output: Path, pair: Pair, *more: object, processes: bool = False) -> Found:
    """The steps of a lease at tiny sizes."""
    with pytest.MonkeyPatch.context() as patch:
        if not processes:
            patch.setattr(on_gpu, "run_step", in_this_process)
        return visit(output, lease, "--dry", "--seconds", 3600, *pair, *more)[1]


def outcomes(found: Found) -> dict[str, str]:
    return {name: each["outcome"] for name, each in found.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target, drafter = write_tiny_pair(tmp_path_factory.mktemp("pair"))
    return "--target", str(target), "--drafter", str(drafter)


@pytest.fixture(scope="module")
def l23(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an L23."""
    output = tmp_path_factory.mktemp("l23") / "out"
    assert outcomes(rehearsed("L23", output, pair)) == dict.fromkeys(["answers", "training"], "ok")
    return output


def unpacked(output: Path, to: Path) -> Path:
    """A folder of `train` with what a visit left."""
    on_gpu.take_in(output, to, fresh=False)
    return to


def initial(drafter: Path) -> Any:
    """The SHA-256 of the weights that a drafter was trained on from."""
    return json.loads((drafter / "provenance.json").read_text())["initial_sha256"]["model.safetensors"]


def test_steps_are_limited_and_kept_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = (sys.executable, "-c")
    steps = [
        Step("good", (*python, f"open({str(tmp_path / 'out.work' / 'good.json')!r}, 'w').write('{{\"a\": 1}}')"), 1.0),
        Step("bad", (*python, "raise SystemExit('no such GPU')"), 1.0),
        Step("endless", (*python, "import time; time.sleep(600)"), 0.1),
        Step("after", (*python, "pass"), 2.0),
    ]
    monkeypatch.setattr(Work, "steps", lambda work, lease: steps)
    monkeypatch.setattr(on_gpu, "LAST_SECONDS", 0.0)
    code, found = visit(tmp_path / "out", "L1", "--seconds", 40)
    assert code == 1
    assert [each["outcome"] for each in found.values()][:2] == ["ok", "exit code 1"]
    assert str(found["endless"]["outcome"]).startswith("ended after")
    assert (found["good"]["result"], found["after"]["outcome"]) == ({"a": 1}, "ok")
    assert "no such GPU" in str(found["bad"]["log"])


@pytest.mark.thorough
def test_the_embedded_engine_is_rehearsed_on_a_cpu(monkeypatch: pytest.MonkeyPatch, pair: Pair, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ended = outcomes(rehearsed("L1", tmp_path / "out", pair, processes=True))
    assert ended.pop("verify, width auto") == "exit code 3"  # a random drafter: no draft was accepted
    assert ended == dict.fromkeys(["bursts", "in flight", "answers", "training"], "ok")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "\n".join(report["table"]).count("auto / better") == 3
    assert (unpacked(tmp_path / "out", tmp_path / "back") / "start" / "config.json").is_file()


def test_training_goes_on_from_the_drafter_and_the_next_one_from_what_came_back(
    l23: Path, pair: Pair, tmp_path: Path
) -> None:
    first = unpacked(l23, tmp_path / "first")
    assert initial(first / "start") == sha256(Path(pair[-1]) / "model.safetensors")
    ended = outcomes(rehearsed("L3", tmp_path / "out", pair, "--bring", l23))
    assert ended == {"training": "ok"}, "it trains on what was brought"
    second = unpacked(tmp_path / "out", tmp_path / "second")
    assert initial(second / "start") == sha256(first / "start" / "model.safetensors")
    assert (second / "data" / "manifest.json").read_text() == (first / "data" / "manifest.json").read_text()


def test_brought_answers_grow_in_a_visit_of_any_length(l23: Path, pair: Pair, tmp_path: Path) -> None:
    """The number of prompts is the brought recipe's, and its minutes are spent already."""
    brought = tmp_path / "answers.tar.xz"
    first = unpacked(l23, tmp_path / "first")
    manifest = json.loads((first / "data" / "manifest.json").read_text())
    (first / "data" / "manifest.json").write_text(json.dumps({**manifest, "finished": False, "shards": []}))
    assert on_gpu.pack_answers(first, brought) is None
    assert outcomes(rehearsed("L2", tmp_path / "out", pair, "--bring", brought)) == {"answers": "ok"}
    grown = json.loads((unpacked(tmp_path / "out", tmp_path / "back") / "data" / "manifest.json").read_text())
    assert grown["recipe_sha256"] == manifest["recipe_sha256"]
    assert grown["seconds"] > manifest["seconds"]
    assert sum(shard["answers"] for shard in grown["shards"]) > 0


@pytest.mark.parametrize("lease", ["L4", "L5"])
def test_a_lease_of_an_engine_that_is_not_here_ends_at_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, lease: str, pair: Pair, tmp_path: Path
) -> None:
    whole = Work.steps
    monkeypatch.setattr(Work, "steps", lambda work, lease: whole(work, lease)[:1])
    (step,) = rehearsed(lease, tmp_path / "out", pair).values()
    assert step["outcome"] == "exit code 2"
    assert "not installed" in step["log"]


def test_what_is_too_large_is_left_out_by_worth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The drafter before answers, and as many answers as fit, with a manifest of these alone."""
    train, output, chance = tmp_path / "train", tmp_path / "out", Random(1)
    (train / "data").mkdir(parents=True)
    (train / "drafter").mkdir()
    (train / "recipe.yaml").write_text("{}")
    (train / "drafter" / "model.safetensors").write_bytes(chance.randbytes(1_500_000))
    shards = [{"file": f"answers-{n:05d}.safetensors", "answers": 10} for n in range(9)]
    for shard in shards:
        (train / "data" / str(shard["file"])).write_bytes(chance.randbytes(150_000))
    (train / "data" / "manifest.json").write_text(json.dumps({"shards": shards, "finished": True, "seconds": 1.0}))
    monkeypatch.setattr(on_gpu, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(on_gpu, "UNWRITTEN", 350_000)
    assert on_gpu.pack_drafter(train / "drafter", output) is None
    said = on_gpu.pack_answers(train, output / "answers.tar.xz")
    back = unpacked(output, tmp_path / "back")
    assert sorted(path.name for path in output.iterdir()) == ["answers.tar.xz", "drafter.tar.1", "drafter.tar.2"]
    assert all(path.stat().st_size <= 1_000_000 for path in output.iterdir())
    assert (back / "start" / "model.safetensors").read_bytes() == (train / "drafter" / "model.safetensors").read_bytes()
    manifest = json.loads((back / "data" / "manifest.json").read_text())
    kept = sorted(path.name for path in (back / "data").glob("answers-*"))
    assert [shard["file"] for shard in manifest["shards"]] == kept == [shard["file"] for shard in shards[: len(kept)]]
    assert 0 < len(kept) < 9
    assert not manifest["finished"]
    assert str(said).startswith(f"{10 * (9 - len(kept))} answers are left out")
    monkeypatch.setattr(on_gpu, "MOST_BYTES", 700_000)
    assert "stays in" in str(on_gpu.pack_drafter(train / "drafter", tmp_path / "other"))


def test_the_script_refuses_what_it_cannot_take_in_and_keeps_what_is_there(l23: Path, tmp_path: Path) -> None:
    (broken := tmp_path / "answers.tar.xz").write_bytes(b"no archive")
    (empty := tmp_path / "empty").mkdir()
    for given, says in ((empty, "no output of this script"), (broken, "does not unpack")):
        refused = call(tmp_path / "out", "L3", "--dry", "--bring", given)
        assert refused.exit_code == 2
        assert says.replace(" ", "") in "".join(refused.output.replace("│", "").split())
    assert set(tmp_path.iterdir()) == {broken, empty}, "nothing is left half-way"
    before = {path.name: path.read_bytes() for path in l23.iterdir()}
    assert call(l23, "L3", "--dry", "--bring", l23).exit_code == 2
    assert {path.name: path.read_bytes() for path in l23.iterdir()} == before


def test_without_answers_an_l3_makes_them_and_fresh_weights_are_taken_only_if_asked_for(
    pair: Pair, tmp_path: Path
) -> None:
    inits = {}
    for fresh in (False, True):
        work = Work(500.0, tmp_path / str(fresh) / "out", True, pair[1], pair[3], fresh)
        on_gpu.begin(work, None)
        assert [step.name for step in work.steps(Lease.L3)] == ["answers", "training"]
        inits[fresh] = load_recipe(work.folder / "training.yaml").drafter.init
    assert inits == {False: pair[3], True: "target"}


@pytest.mark.parametrize("lease", Lease)
@pytest.mark.parametrize("dry", [True, False])
def test_every_command_of_every_lease_exists(lease: Lease, dry: bool, tmp_path: Path) -> None:
    """Options are looked up in the commands' own help, so that a lease does not fail by a renamed one."""
    for step in Work(500.0, tmp_path, dry, "smollm2", "smollm2").steps(lease):
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

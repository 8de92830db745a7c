"""A build goes on where it was stopped, keeps what is still right, and finds what was changed behind its back."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_engines.pipeline import Done, Measured, Source, Step, Work, run, verify_output
from dflash_serve.checkpoint.files import checksum_problems, read_manifest
from dflash_serve.errors import UserError
from tests.support.built import flip_last_byte


class Bench:
    """Three steps in a row, counting how often each runs; `fails` stops before that one is done."""

    def __init__(self, folder: Path) -> None:
        self.output, self.ran, self.fails = folder / "out", list[str](), ""
        self.source = folder / "source"
        self.source.mkdir()
        (self.source / "words").write_text("one two three")

    def steps(self, power: int = 2) -> list[Step]:
        def count(work: Work) -> Measured:
            return self.write(work, "count", str(len((work.inputs["source"] / "words").read_text().split())))

        def raise_(work: Work) -> Measured:
            return self.write(work, "raise", str(int((work.inputs["count"] / "result").read_text()) ** power))

        def report(work: Work) -> Measured:
            return self.write(work, "report", "= " + (work.inputs["raise"] / "result").read_text())

        return [
            Step("count", count, ("source",)),
            Step("raise", raise_, ("count",), {"power": power}, ("pydantic",)),
            Step("report", report, ("raise",)),
        ]

    def write(self, work: Work, name: str, text: str) -> Measured:
        self.ran.append(name)
        (work.folder / "result").write_text(text)
        if self.fails == name:
            raise KeyboardInterrupt
        return {"length": len(text)}

    def run(self, power: int = 2) -> Sequence[Done]:
        self.ran.clear()
        digest = str(hash((self.source / "words").read_text()))
        return run(self.steps(power), {"source": Source(self.source, digest, {"model": "words"})}, self.output)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_step_runs_once(bench: Bench) -> None:
    bench.run()
    assert bench.ran == ["count", "raise", "report"]
    assert (bench.output / "report" / "result").read_text() == "= 9"
    assert [done.state for done in bench.run()] == ["there already"] * 3
    assert bench.ran == []


@pytest.mark.parametrize("stopped", ["count", "raise", "report"])
def test_killed_at_any_step_it_goes_on_from_there(stopped: str, bench: Bench) -> None:
    bench.fails = stopped
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    bench.fails = ""
    bench.run()
    names = ["count", "raise", "report"]
    assert bench.ran == names[names.index(stopped) :]
    assert not list((bench.output / "steps").glob(".*"))
    assert verify_output(bench.output) == []


def test_a_changed_parameter_runs_what_depends_on_it_and_no_more(bench: Bench) -> None:
    bench.run()
    bench.run(power=3)
    assert bench.ran == ["raise", "report"]
    assert (bench.output / "report" / "result").read_text() == "= 27"
    bench.run(power=2)  # still there
    assert bench.ran == []


def test_a_step_that_gives_the_same_bytes_spares_those_after_it(bench: Bench) -> None:
    bench.run()
    (bench.source / "words").write_text("uno due tre")
    bench.run()
    assert bench.ran == ["count"]


def test_the_manifest_says_where_everything_came_from(bench: Bench) -> None:
    bench.run()
    manifest = read_manifest(bench.output / "raise")
    assert manifest is not None
    assert (manifest.step, manifest.parameters, manifest.measured) == ("raise", {"power": 2}, {"length": 1})
    assert manifest.tools.keys() == {"pydantic"}
    assert manifest.files["result"].size == 1
    summary = json.loads((bench.output / "manifest.json").read_text())
    assert list(summary["steps"]) == ["count", "raise", "report"]
    assert summary["sources"] == {"source": {"model": "words"}}


def test_a_flipped_byte_is_found_and_rebuilt(bench: Bench) -> None:
    bench.run()
    path = (bench.output / "raise" / "result").resolve()
    flip_last_byte(path)
    (problem,) = verify_output(bench.output)
    assert "sha256 differs" in problem.what
    assert str(path) == problem.where
    bench.run()
    assert bench.ran == ["raise"]
    assert verify_output(bench.output) == []


def test_lost_cut_and_added_files_are_found(bench: Bench) -> None:
    bench.run()
    folder = (bench.output / "report").resolve()
    (folder / "extra").write_text("?")
    assert [problem.what for problem in checksum_problems(folder)] == ["is not in the manifest"]
    (folder / "result").write_text("=")
    assert "bytes, its manifest says" in checksum_problems(folder)[0].what
    (folder / "result").unlink()
    assert checksum_problems(folder)[0].what == "is missing"


def test_a_folder_without_a_manifest_has_no_problems(tmp_path: Path) -> None:
    assert checksum_problems(tmp_path) == []
    with pytest.raises(UserError, match="no manifest of a finished build"):
        verify_output(tmp_path)


def test_a_broken_manifest_is_an_error(bench: Bench) -> None:
    bench.run()
    (bench.output / "report" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as a manifest"):
        checksum_problems(bench.output / "report")


def test_a_second_build_of_a_folder_waits_for_the_first_and_spares_its_scratch(bench: Bench) -> None:
    """Two releases on one claim: without the lock the second removed what the first was writing."""
    scratch = bench.output / "steps" / ".count-0123.abcd"
    scratch.mkdir(parents=True)
    said = list[str]()
    source = {"source": Source(bench.source, "digest", {"model": "words"})}
    with (bench.output / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(
            target=run,
            args=(bench.steps(), source, bench.output),
            kwargs={"on_progress": lambda _, line: said.append(line)},
        )
        second.start()
        second.join(0.5)
        assert (second.is_alive(), scratch.is_dir(), bench.ran) == (True, True, [])
        assert said == [f"another build writes {bench.output}; waiting for its end"]
    second.join(30)
    assert (bench.ran, scratch.exists()) == (["count", "raise", "report"], False)

"""Finished results are on disk, are reused under their own key only, and are never half there."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from dflash_serve.common.store import ResultFolders, Store, resumable
from dflash_serve.errors import UserError

MINE = {"plan": {"samples": 4, "dtype": "float32"}, "sides": {"with": {"url": "http://a"}}}
OTHER = {**MINE, "plan": {"samples": 5, "dtype": "float32"}}


def test_values_outlive_a_kill_and_a_cut_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = Store(path, MINE)
    store.put("with/greedy/0", [1, "two", 3])
    with path.open("a") as file:
        file.write('{"key": "x", "name": "with/greedy/1", "val')
    again = Store(path, MINE)
    assert again.values == {"with/greedy/0": [1, "two", 3]}
    again.put("with/greedy/1", [4])
    assert Store(path, MINE)["with/greedy/1"] == [4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_mending_a_cut_line_needs_no_room(tmp_path: Path) -> None:
    """Where it did, a full disk or a kill at that moment would lose all values."""
    path = tmp_path / "s"
    Store(path, MINE).put("a", [1] * 100)
    with path.open("a") as file:
        file.write('{"key": "x')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        assert Store(path, MINE).values == {"a": [1] * 100}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Store(path, MINE).values == {"a": [1] * 100}


def test_a_file_cut_in_its_first_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Store(path, MINE).put("a", 0)
    path.write_text(path.read_text()[:30])
    Store(path, MINE).put("a", 1)
    assert Store(path, MINE).values == {"a": 1}


def test_another_key_starts_anew_says_why_and_leaves_the_old_values(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Store(path, MINE).put("a", 1)
    other = Store(path, OTHER)
    assert other.values == {}
    assert other.changed == "plan.samples: 4 there, 5 here"
    other.put("a", 2)
    assert Store(path, OTHER).changed is None
    assert (Store(path, MINE)["a"], Store(path, OTHER)["a"]) == (1, 2)


@pytest.mark.parametrize("content", ["nonsense", "nonsense\n", '{"name": "a"}\n', "[]\n", '{"key": "a"}\n'])
def test_another_file_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "s").write_text(content)
    with pytest.raises(UserError, match="remove it"):
        Store(tmp_path / "s", MINE)
    assert (tmp_path / "s").read_text() == content


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--output"):
        Store(tmp_path / "missing" / "s", MINE)


def interrupted(output: Path, made_by: dict[str, object], *, resume: bool = False) -> dict[str, object]:
    """Puts one more value and stops; returns what was there before."""
    before: dict[str, object] = {}
    with pytest.raises(KeyboardInterrupt), resumable(output, made_by, "answers", resume=resume) as store:  # noqa: PT012
        before |= store.values
        store.put(f"answer {len(before)}", 1)
        raise KeyboardInterrupt
    return before


def test_a_command_goes_on_only_if_asked_and_leaves_nothing_when_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "report.json"
    with pytest.raises(UserError, match="nothing to go on with"), resumable(output, MINE, "answers", resume=True):
        pass
    assert not output.parent.exists()
    interrupted(output, MINE)
    assert "1 answers are kept" in capsys.readouterr().err
    with pytest.raises(UserError, match="--resume"), resumable(output, MINE, "answers", resume=False):
        pass
    assert interrupted(output, MINE, resume=True) == {"answer 0": 1}
    assert interrupted(output, OTHER, resume=True) == {}
    assert "made with other settings (plan.samples: 4 there, 5 here); starting anew" in capsys.readouterr().err
    with resumable(output, MINE, "answers", resume=True) as store:
        assert len(store.values) == 2
    assert list(output.parent.iterdir()) == []


def test_nothing_is_left_of_a_run_that_kept_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no answer"), resumable(tmp_path / "r", MINE, "answers", resume=False):
        raise UserError("no answer")
    assert list(tmp_path.iterdir()) == []


def test_a_result_folder_is_whole_or_absent(tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path)
    with pytest.raises(KeyboardInterrupt), folders.put("step", "a" * 64) as scratch:  # noqa: PT012
        (scratch / "half").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with folders.put("step", "a" * 64) as scratch:
        (scratch / "whole").touch()
    assert folders.get("step", "a" * 64) == tmp_path / f"step-{'a' * 12}"
    assert folders.get("step", "b" * 64) is None
    assert folders.under_other_keys("step", "b" * 64) == [tmp_path / f"step-{'a' * 12}"]


def test_the_advice_to_go_on_stands_before_an_engines_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dflash-serve", "verify", "a b.yaml", "--", "--enable-lora"])
    interrupted(tmp_path / "report.json", MINE)
    assert "go on with: dflash-serve verify 'a b.yaml' --resume -- --enable-lora\n" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output, said in ((tmp_path, "a folder, no file"), (Path(), "a folder"), (tmp_path / "file" / "r", "--output")):
        with pytest.raises(UserError, match=said), resumable(output, MINE, "answers", resume=False):
            pytest.fail("it began")
    with resumable(tmp_path / "new" / "r", MINE, "answers", resume=False):
        assert (tmp_path / "new").is_dir()

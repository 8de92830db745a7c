"""What is finished is on disk, and only the same verification goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.common.journal import Journal
from dflash_serve.errors import UserError

MINE = {"plan": {"samples": 4}, "sides": {"with": {"url": "http://a"}}}


def test_what_was_put_is_there_after_a_kill_and_a_cut_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, MINE)
    journal.put("with/greedy/0", [1, "two", 3])
    with path.open("a") as file:
        file.write('{"name": "with/greedy/1", "val')
    again = Journal(path, MINE, resume=True)
    assert again["with/greedy/0"] == [1, "two", 3]
    assert "with/greedy/1" not in again
    again.put("with/greedy/1", [4])
    assert Journal(path, MINE, resume=True)["with/greedy/1"] == [4]


def test_nothing_is_left_where_nothing_is_to_be_gone_on_with(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", MINE)
    journal.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_one_is_not_overwritten(tmp_path: Path) -> None:
    Journal(tmp_path / "j", MINE).put("a", 1)
    with pytest.raises(UserError, match="--resume"):
        Journal(tmp_path / "j", MINE)


@pytest.mark.parametrize("content", ["", "nonsense\n", '{"name": "a"}\n', "[]\n"])
def test_what_is_no_journal_is_one_clear_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "j").write_text(content)
    with pytest.raises(UserError, match="remove it"):
        Journal(tmp_path / "j", MINE, resume=True)


def test_another_verification_does_not_go_on_with_it(tmp_path: Path) -> None:
    Journal(tmp_path / "j", MINE)
    with pytest.raises(UserError, match=r"another run \(plan\)"):
        Journal(tmp_path / "j", {**MINE, "plan": {"samples": 5}}, resume=True)
    with pytest.raises(UserError, match="nothing to go on with"):
        Journal(tmp_path / "other", MINE, resume=True)


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--output"):
        Journal(tmp_path / "missing" / "j", MINE)

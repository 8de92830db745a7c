"""One rule for ${NAME} in every recipe: filled in after parsing, refused where it is not set."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.common.documents import read_recipe_file
from dflash_serve.errors import UserError


def read(folder: Path, text: str) -> object:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return read_recipe_file(path)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "here")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("${SET}/a", "here/a"),
        ("${SET}-${SET}", "here-here"),
        ("${SET:-there}", "here"),
        ("${UNSET:-there}/a", "there/a"),
        ("${UNSET:-}", None),
        ("$SET", "$SET"),
        ("", ""),
    ],
)
def test_a_variable_is_the_environments_or_its_default(tmp_path: Path, written: str, given: object) -> None:
    assert read(tmp_path, f'a: ["{written}", 1]') == {"a": [given, 1]}


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\$\{UNSET\} is not set; export UNSET=") as error:
        read(tmp_path, "a: {b: '${UNSET}/x'}")
    assert "recipe.yaml" in error.value.where


def test_a_value_cannot_change_the_files_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "x}, c: {d: 1")
    assert read(tmp_path, "{a: {b: '${SET}'}}") == {"a": {"b": "x}, c: {d: 1"}}

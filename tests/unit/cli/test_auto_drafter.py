"""`drafter: auto` in every verb with a drafter: the best published one is taken, at its commit, and it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.adapter import checks
from dflash_serve.checkpoint.catalogue import AUTO, Catalogue
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.errors import UserError
from tests.support.command_line import call


@pytest.fixture(autouse=True)
def _published(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue in which the tiny drafter is published for the tiny target, and a worse one."""
    heads = {"markov": {"kind": "vanilla", "rank": 4}}
    refused = {name: {"verdict": "refused", "why": "not here"} for name in ("torch", "sglang")}
    target, drafter = map(str, pair)
    rows: list[dict[str, object]] = [
        {"repository": "a/dspark", "target": target, "engines": refused},
        {"repository": drafter, "target": target},
        {"repository": "a/other", "target": "a/target", "kind": "DSpark", "heads": heads, "revision": "0" * 40},
    ]
    absent = ("weights", "target_precision", "thinking", "revision", "licence", "gated", "unread", "sizes")
    known = {"kind": "DFlash", "block_size": 4, "heads": {}, "acceptance_length": (), "source": "a test"}
    served = {name: {"verdict": "served"} for name in ("torch", "sglang")}
    blank = {**dict.fromkeys(absent), **known, "engines": served}
    made = Catalogue.model_validate({"gathered": "2026-11-22", "drafters": [{**blank, **row} for row in rows]})
    monkeypatch.setattr("dflash_serve.checkpoint.catalogue.catalogue", lambda: made)


def test_evaluate_measures_it_by_its_name(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "the fox"}) + "\n")
    asked = ("evaluate", "--task", f"own={tmp_path / 'p.jsonl'}", "--target", pair[0], "--drafter", AUTO)
    rest = ("--max-tokens", 4, "--speed", 0, "--no-controls", "--output", tmp_path / "report.json")
    assert call(monkeypatch, *asked, *rest) == 0
    assert "the best known" in capsys.readouterr().err
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["drafter"], report["width"]) == (str(pair[1]), 4)  # the whole block of what was chosen


def test_generate_says_it_unless_it_is_to_be_quiet(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("generate", "the fox", "--raw", "--target", pair[0], "--drafter", AUTO, "--max-tokens", 4, "--width", 3)
    said = f"dflash-serve: drafter: {pair[1]} (DFlash, B 4), the best known of {pair[0]}"
    assert [(call(monkeypatch, *asked, *more), said in capsys.readouterr().err) for more in ((), ("--quiet",))] == [
        (0, True),
        (0, False),
    ]


def test_bench_and_plan_take_it_too(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from dflash_serve.bench.settings import find_variants, read_deployment
    from tests.support.bench_sites import settings

    asked = settings(target=str(pair[0]), drafter=AUTO)
    found, told = read_deployment(asked)
    assert found is not None and found.drafter is not None  # noqa: PT018
    assert found.drafter.model == str(pair[1])
    assert told is not None and "the best known" in told  # noqa: PT018
    assert list(find_variants(asked, found)[0]) == ["off", "fixed 4", "auto"]
    given = ("--gpu", "b200", "--output", tmp_path / "plan")
    call(monkeypatch, "plan", "--target", pair[0], "--drafter", AUTO, *given)
    assert "the best known" in capsys.readouterr().err


def test_doctor_examines_it_at_its_commit(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[Model | None] = []

    def examine(deployment: Deployment, *_: object, **__: object) -> None:
        examined.append(deployment.drafter)
        raise UserError("seen")

    monkeypatch.setattr("dflash_serve.doctor.examiner.examine", examine)
    for target in (pair[0], "a/target"):
        assert call(monkeypatch, "doctor", "--target", target, "--drafter", AUTO) == 2
    assert examined == [Model(model=str(pair[1])), Model(model="a/other", revision="0" * 40)]


def test_evaluate_reads_the_block_of_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def read(name: str, revision: str | None = None) -> object:
        asked.append((name, revision))
        raise UserError("seen")

    monkeypatch.setattr(checks, "read_config", read)
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "the fox"}\n')
    assert call(monkeypatch, "evaluate", "--target", "a/target", "--drafter", AUTO, "--task", f"mine={prompts}") == 2
    assert asked == [("a/other", "0" * 40)]

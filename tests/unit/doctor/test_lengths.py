"""Acceptance that falls with the context's length, and what of the drafter ends there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig
from dflash_serve.doctor import examiner
from dflash_serve.doctor.evidence import Interview, Observation
from dflash_serve.doctor.lengths import Fall, LengthFigures, causes, fall_of, fall_of_prompts, figures_of_report
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from tests.support.command_line import call
from tests.support.tiny import tiny_drafter_config

PROMPTS = ("the quick brown fox", "over", "lazy dog")


def report(folder: Path, lengths: Mapping[str, float | None]) -> Path:
    """A report of `evaluate --by length`, with 200 steps in each range."""
    rows = {name: {"prompts": 9, "steps": 200, "acceptance_length": one} for name, one in lengths.items()}
    path = folder / "evaluation.json"
    path.write_text(json.dumps({"tasks": {}, "by": {"length": rows}}))
    return path


def counted(length: float, steps: float = 100) -> AcceptanceStatistics:
    return AcceptanceStatistics(steps, 7 * steps, steps * (length - 1), None, None, None)


@pytest.mark.parametrize(
    ("lengths", "fall"),
    [
        ({"0-127": 2.9, "512-1023": 2.9, "2048-4095": 1.4, "4096-8191": 1.4}, Fall(2048, 2.9, 1.4)),
        ({"0-127": 2.9, "512-1023": 2.8, "2048-4095": 2.7}, None),
        ({"0-127": 1.4, "512-1023": 2.9}, None),
        ({"0-127": 2.9, "512-1023": None, "2048-4095": 1.0}, Fall(2048, 2.9, 1.0)),
        ({"0-127": 3.0}, None),
    ],
)
def test_the_length_beyond_which_acceptance_falls_is_found(
    tmp_path: Path, lengths: Mapping[str, float | None], fall: Fall | None
) -> None:
    assert fall_of(figures_of_report(report(tmp_path, lengths))) == (fall and pytest.approx(fall))


def test_few_steps_show_no_fall() -> None:
    assert fall_of([LengthFigures(0, 400, 3.0), LengthFigures(2048, 20, 1.2)]) is None


@pytest.mark.parametrize(
    ("changes", "beyond", "draft_window", "told"),
    [
        ({}, 2048, None, "a limit near it is the drafter's positions (2,048 tokens)"),
        ({"max_position_embeddings": 40960, "layers": (AttentionKind(window=2048),)}, 2048, None,
         "a limit near it is the window of its layers (2,048 tokens)"),
        ({"max_position_embeddings": 40960}, 4096, 4096, "a limit near it is speculation.draft_window (4,096 tokens)"),
        ({"rope": RopeConfig(scaling="yarn", factor=4.0, original_max_position_embeddings=8192),
          "max_position_embeddings": 40960}, 8192, None, "a limit near it is the positions that its RoPE was scaled"),
        ({"max_position_embeddings": 40960}, 2048, None,
         "no limit of the drafter is near it (the drafter's positions 40,960): its training had few such"),
    ],
)  # fmt: skip
def test_limits_of_the_drafter_near_it_are_named(
    changes: Mapping[str, object], beyond: int, draft_window: int | None, told: str
) -> None:
    config = tiny_drafter_config(max_position_embeddings=2048).model_copy(update=changes)
    assert causes(Fall(beyond, 2.9, 1.4), config, draft_window).startswith(told)


def test_a_fall_of_a_server_is_its_own_or_its_drafter_s() -> None:
    each, contexts = [counted(3.0), counted(3.0), counted(1.5)], [100, 120, 3000]
    assert fall_of_prompts(each, [counted(3.0)] * 3, contexts) == (
        Fall(2048, 3.0, 1.5),
        "where that of our own engine is 3.00 and 3.00, so the server's does",
    )
    assert fall_of_prompts(each, each, contexts) == (
        Fall(2048, 3.0, 1.5),
        "where that of our own engine is 3.00 and 1.50, so the drafter's does",
    )
    assert fall_of_prompts(each, each, [100, None, 3000]) is None
    assert fall_of_prompts([counted(3.0)] * 3, each, contexts) is None


def test_the_doctor_tells_falls_of_a_report_and_of_a_server(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each = (counted(3.0), counted(3.0), counted(1.5))
    told = Interview(Observation(total(each), each, PROMPTS), 4, None, None, (), (100, 120, 3000))
    monkeypatch.setattr(examiner, "interview", lambda *_: told)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = ("--target", pair[0], "--drafter", pair[1], "--prompts", file, "--max-tokens", 12, "--output", output)
    measured = report(tmp_path, {"0-127": 2.9, "2048-4095": 1.4})
    call(monkeypatch, "doctor", *given, "--url", "http://127.0.0.1:9", "--survival", measured)
    sentences = json.loads(output.read_text())["sentences"]
    assert sentences[1].startswith("acceptance falls from 2.90 to 1.40 beyond 2,048 tokens: ")
    assert sentences[2].startswith("acceptance falls from 3.00 to 1.50 beyond 2,048 tokens, where that of our own eng")
    assert "acceptance falls from 2.90 to 1.40 beyond 2,048 tokens" in " ".join(capsys.readouterr().out.split())


def test_a_report_without_lengths_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"tasks": {}}')
    with pytest.raises(UserError, match="it has no acceptance by length; give the JSON of `evaluate --by length --out"):
        figures_of_report(tmp_path / "other.json")

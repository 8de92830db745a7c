"""What a server tells of itself, prompt by prompt, and the command on a tiny pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_serve.client.acceptance_reading import AcceptanceReading

from dflash_serve.cli.main import run
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.errors import UserError
from dflash_serve.proving.doctor.counts import Counts, total
from dflash_serve.proving.doctor.suspect import _width, interview
from dflash_serve.speculation.params import SamplingParams
from dflash_torch.evaluation import Evaluation
from dflash_torch.faults.reference import EmbeddedReference
from tests.support.embedded import tiny_engine
from tests.support.serving import Running, running
from tests.support.tiny_target import write_tiny_pair

PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[{"role": "user", "content": text}] for text in ("the quick brown fox", "over", "lazy dog")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def served(pair: tuple[Path, Path]) -> Iterator[Running]:
    with running(tiny_engine(pair, width=4)) as server:
        yield server


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dflash-serve", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        run()
    return int(stopped.value.code or 0)


def given(pair: tuple[Path, Path], tmp_path: Path) -> tuple[object, ...]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": prompt}) + "\n" for prompt in PROMPTS))
    report = tmp_path / "report.json"
    return "--target", pair[0], "--drafter", pair[1], "--prompts", prompts, "--max-tokens", 12, "--output", report


def test_a_server_is_read_prompt_by_prompt(served: Running, pair: tuple[Path, Path]) -> None:
    told = interview(Endpoint(served.url), PROMPTS, PARAMS, 4)
    found = dict(Evaluation(tiny_engine(pair, width=4), 4).outputs(PROMPTS, PARAMS))
    expected = tuple(Counts.of(found[index].statistics, 4) for index in range(3))
    assert told.observation.each == expected
    assert told.observation.whole == total(expected)
    assert told.observation.answers == tuple(found[index].text for index in range(3))
    assert (told.width, told.engine, told.notes) == (4, "dflash-serve", ())


def test_a_server_that_does_not_speculate_says_nothing(pair: tuple[Path, Path]) -> None:
    with running(tiny_engine(pair, width=1)) as server, pytest.raises(UserError, match="nothing of its acceptance"):
        interview(Endpoint(server.url), PROMPTS, PARAMS, 4)


def test_a_width_that_changes_is_refused_and_a_constant_one_is_found() -> None:
    assert _width(AcceptanceReading(widths={1: 40, 8: 90, 3: 5}), 4, 8, "x") == 8
    assert _width(AcceptanceReading(steps=100, drafted=700), 4, 8, "x") == 8
    assert _width(AcceptanceReading(steps=100, drafted=680), 4, 8, "x") == 8
    assert _width(AcceptanceReading(steps=100, drafted=300), 4, 8, "x") == 4
    assert _width(AcceptanceReading(acceptance_length=2.0), 4, 8, "x") == 8
    assert _width(AcceptanceReading(widths={8: 30, 5: 14, 2: 14}), 4, 8, "x") == 8  # the ends of short answers
    varying = AcceptanceReading(widths={2: 50, 8: 50}), AcceptanceReading(widths={8: 60, 4: 30})
    for changing in (*varying, AcceptanceReading(steps=100, drafted=350)):
        with pytest.raises(UserError, match="width changes"):
            _width(changing, 4, 8, "x")


def test_a_server_of_the_pair_is_examined(
    monkeypatch: pytest.MonkeyPatch, served: Running, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    code = call(monkeypatch, *given(pair, tmp_path), "--url", served.url)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["evidence"] == "paired"
    assert report["observed"]["acceptance_length"] == report["explanations"][0]["predicted"]["acceptance_length"]
    assert {"healthy": 0, "fault": 1, "could not tell": 2}[report["verdict"]] == code
    assert not list(tmp_path.glob("*.partial.jsonl"))


def test_an_interrupted_examination_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    predict = EmbeddedReference.predict

    def interrupted(self: EmbeddedReference, fault: Any) -> Any:
        asked.append(fault.name if fault else "as it is")
        if len(asked) == 6:
            raise KeyboardInterrupt
        return predict(self, fault)

    monkeypatch.setattr(EmbeddedReference, "predict", interrupted)
    arguments = (*given(pair, tmp_path), "--observed", 1.5)
    assert call(monkeypatch, *arguments) == 130
    said = capsys.readouterr().err
    assert "5 finished probes are kept" in said
    assert "--resume" in said
    assert not (tmp_path / "report.json").exists()
    first = asked[:5]
    assert call(monkeypatch, *arguments, "--resume") == 2
    assert not set(first) & set(asked[6:])
    assert (tmp_path / "report.json").exists()


def test_a_pair_alone_is_examined(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *given(pair, tmp_path)) == 2  # three prompts cannot show anything
    assert "3 prompts cannot show that a setting helps, 9 could" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "report.json").read_text())["first_difference"] is None


def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--url", "http://127.0.0.1:9", "--observed", 2) == 2
    assert "--observed" in capsys.readouterr().err
    assert call(monkeypatch, "--url", "http://127.0.0.1:9", "--drafter", "smollm2") == 2
    assert "127.0.0.1:9" in capsys.readouterr().err

"""`evaluate`: every task with its controls; what it cannot run is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_serve.backend import Engine
from dflash_serve.speculation.params import SamplingParams
from dflash_torch.engine import CONTROLS, EmbeddedEngine
from tests.support.command_line import call
from tests.support.embedded import answers, tiny_engine
from tests.support.tiny_target import write_tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the fox", "a dog", "over")))
    return path


def test_each_task_is_shown_with_all_controls(
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    prompts: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = ("--target", pair[0], "--drafter", pair[1], "--max-tokens", 12, "--width", 4)
    output = tmp_path / "out.json"
    assert call(monkeypatch, "evaluate", "--task", f"mine={prompts}", *given, "--output", output) == 0
    task = json.loads(output.read_text())["tasks"]["mine"]
    assert set(task) == {"as it is", *CONTROLS}
    assert all(row["prompts"] == 3 and row["acceptance_length"] >= 1 for row in task.values())
    assert task["as it is"]["speed_up"] > 0
    told = capfd.readouterr()
    assert told.err == "", "no progress where nobody watches"
    assert all(line.strip() for line in told.out.splitlines()), "and no blank lines"


def widths_of(engine: Engine) -> dict[int, float] | None:
    """Of the steps of one short answer."""
    return answers(engine, ["the fox"], SamplingParams(temperature=0, max_tokens=12))[0].statistics.widths


@pytest.mark.parametrize(("given", "stated"), [((), 4), (("--width", 3), 3), (("--width", "auto"), "auto")])
def test_the_acceptance_length_and_the_speed_up_are_at_the_one_width_that_is_stated(
    given: tuple[object, ...],
    stated: int | str,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    prompts: Path,
    tmp_path: Path,
) -> None:
    measured: list[Engine] = []
    timed: list[Engine] = []
    stream = EmbeddedEngine.stream

    def streaming(self: EmbeddedEngine, *args: Any) -> Any:
        measured.append(self)
        return stream(self, *args)

    def timing(engine: Engine, *_: object) -> float:
        timed.append(engine)
        return 2.0

    monkeypatch.setattr(EmbeddedEngine, "stream", streaming)
    monkeypatch.setattr("dflash_serve.cli.evaluate.speed_up", timing)
    output = tmp_path / "out.json"
    pair_given = ("--target", pair[0], "--drafter", pair[1], "--max-tokens", 12, "--output", output)
    assert call(monkeypatch, "evaluate", "--task", f"mine={prompts}", *pair_given, *given) == 0
    report = json.loads(output.read_text())
    assert report["width"] == stated
    assert set(report["tasks"]["mine"]) == {"as it is", *(CONTROLS if stated != "auto" else ())}
    if stated == "auto":
        assert measured == timed  # one engine, which chooses its widths itself
        return
    monkeypatch.undo()
    expected = widths_of(tiny_engine(pair, width=int(stated)))
    assert max(expected or ()) == stated
    assert [widths_of(engine) for engine in (*measured, *timed)] == [expected] * (1 + len(CONTROLS) + 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--width", "auto", "--controls"), "controls need a fixed width"),
        (("--width", "off"), "without speculation"),
        (("--width", "1"), "without speculation"),
        (("--width", "wide"), "speculation.width"),
    ],
)
def test_a_width_that_measures_nothing_is_one_line(
    given: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = ("--target", pair[0], "--drafter", pair[1])
    assert call(monkeypatch, "evaluate", "--task", f"mine={prompts}", *drafter, *given) == 2
    assert said in capsys.readouterr().err


def test_controls_change_the_context_and_not_the_answer(pair: tuple[Path, Path]) -> None:
    engine = tiny_engine(pair, width=4)
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = answers(engine, ["the quick brown fox"], params)[0].token_ids
    contexts = []
    for control in engine.controls:
        scheduler = engine.fixed(4, fault=control).scheduler
        request = scheduler.join(engine.tokenize("the quick brown fox"), params)
        while scheduler.running:
            scheduler.step()
        assert request.output_ids == expected
        assert scheduler.speculator is not None
        contexts.append(scheduler.speculator.cache.keys[0, 0, 0, :6].clone())
    assert not any(torch.equal(a, b) for n, a in enumerate(contexts) for b in contexts[:n])


def test_every_prompt_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = ("--target", pair[0], "--drafter", pair[1], "--max-batch-size", 2, "--max-tokens", 8)
    only = ("--no-controls", "--speed", 0, "--json")
    assert call(monkeypatch, "evaluate", "--task", f"mine={prompts}", *drafter, *only) == 0
    (row,) = json.loads(capsys.readouterr().out)["tasks"]["mine"].values()
    texts = [[{"role": "user", "content": text}] for text in ("the fox", "a dog", "over")]
    outputs = answers(tiny_engine(pair, width=4), texts, SamplingParams(temperature=0, max_tokens=8))
    assert (row["prompts"], row["steps"]) == (3, sum(output.statistics.steps or 0 for output in outputs))


def test_what_is_no_task_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "evaluate", "--task", "nonsense") == 2
    assert "nonsense" in capsys.readouterr().err

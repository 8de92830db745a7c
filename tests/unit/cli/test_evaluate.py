"""`evaluate`: every task with its controls; what it cannot run is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_serve.answers.engine import Engine
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import total
from dflash_torch.backend import EmbeddedBackend
from dflash_torch.engine import CONTROLS, EmbeddedEngine
from tests.support.command_line import call
from tests.support.embedded import answers, tiny_engine


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


@pytest.mark.parametrize(("given", "stated"), [((), 4), (("--width", 3), 3), (("--width", "auto"), "auto")])
def test_the_acceptance_length_and_the_speed_up_are_at_the_one_width_that_is_stated(
    given: tuple[object, ...],
    stated: int | str,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    timed: list[Engine] = []

    def compare(engine: Engine, *_: object) -> SimpleNamespace:
        timed.append(engine)
        return SimpleNamespace(ratio=2.0)

    monkeypatch.setattr("dflash_serve.answers.evaluation.compare_with_plain", compare)
    monkeypatch.setattr(
        "dflash_serve.answers.evaluation.context_needed", lambda *_: 99
    )  # not the target's whole context
    asked = ("--target", pair[0], "--drafter", pair[1], "--max-tokens", 12, "--max-batch-size", 2, "--json")
    assert call(monkeypatch, "evaluate", "--task", f"mine={prompts}", *asked, *given) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["width"] == stated
    rows = report["tasks"]["mine"]
    assert set(rows) == {"as it is", *(CONTROLS if stated != "auto" else ())}
    assert rows["as it is"]["speed_up"] == 2.0
    if stated == "auto":
        return
    texts = [[{"role": "user", "content": text}] for text in ("the fox", "a dog", "over")]
    params = SamplingParams(temperature=0, max_tokens=12)
    assert [engine.scheduler.capacity for engine in timed if isinstance(engine, EmbeddedEngine)] == [99]
    for engine in (tiny_engine(pair, width=int(stated)), *timed):
        statistics = total(output.statistics for output in answers(engine, texts, params))
        assert (rows["as it is"]["prompts"], rows["as it is"]["steps"]) == (3, statistics.steps)
        assert max(statistics.widths or ()) == stated


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--width", "auto", "--controls"), "controls need a fixed width"),
        (("{auto}", "--controls"), "controls need a fixed width"),
        (("--task", "mine={prompts}"), "two tasks are called 'mine'"),
        (("--output", "{folder}"), "a folder, no file"),
        (("--output", "{auto}/report.json"), "cannot be written"),
        (("--width", "off"), "without speculation"),
        (("--width", "1"), "without speculation"),
        (("--width", "wide"), "speculation.width"),
        (("--task", "nonsense"), "nonsense"),
    ],
)
def test_what_measures_nothing_or_cannot_be_written_is_one_line(
    given: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (auto := prompts.with_name("auto.yaml")).write_text("speculation: {width: auto}")
    monkeypatch.setattr(EmbeddedBackend, "engine", lambda *_: pytest.fail("it is said before anything is loaded"))
    drafter = ("--target", pair[0], "--drafter", pair[1])
    words = [word.format(auto=auto, prompts=prompts, folder=prompts.parent) for word in given]
    assert call(monkeypatch, "evaluate", "--task", f"mine={prompts}", *drafter, *words) == 2
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
        contexts.append(scheduler.speculator.cache.keys[0, request.entry, 0, :6].clone())
    assert not any(torch.equal(a, b) for n, a in enumerate(contexts) for b in contexts[:n])

"""`evaluate`: every task with its controls; what it cannot run is one clear line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from dflash_serve.cli.main import run
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.width import FixedWidth
from dflash_torch.controls import CONTROLS, controls
from dflash_torch.evaluation import Evaluation
from dflash_torch.scheduler import Scheduler
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


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dflash-serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        run()
    return int(stopped.value.code or 0)


def test_each_task_is_shown_with_all_controls(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    given = ("--target", pair[0], "--drafter", pair[1], "--max-tokens", 12, "--width", 4)
    output = tmp_path / "out.json"
    assert call(monkeypatch, "evaluate", "--task", f"mine={prompts}", *given, "--output", output) == 0
    task = json.loads(output.read_text())["tasks"]["mine"]
    assert set(task) == {"as it is", *CONTROLS}
    assert all(row["prompts"] == 3 and row["acceptance_length"] >= 1 for row in task.values())
    assert task["as it is"]["speed_up"] > 0


def test_controls_change_the_context_and_not_the_answer(pair: tuple[Path, Path]) -> None:
    engine = tiny_engine(pair, width=4)
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = answers(engine, ["the quick brown fox"], params)[0].token_ids
    full = engine.scheduler
    assert full.speculator is not None
    contexts = []
    for control in controls(full.speculator).values():
        speculator = control.change(full.speculator)
        scheduler = Scheduler(
            full.target, speculator, FixedWidth(4), max_batch_size=1, capacity=full.capacity, reuse_prefixes=False
        )
        sequence = scheduler.join(engine.tokenize("the quick brown fox"), params)
        while scheduler.running:
            scheduler.step()
        assert sequence.output_ids == expected
        contexts.append(speculator.cache.keys[0, 0, 0, :6].clone())
    assert not any(torch.equal(a, b) for n, a in enumerate(contexts) for b in contexts[:n])


def test_every_prompt_is_counted_once(pair: tuple[Path, Path]) -> None:
    evaluation = Evaluation(tiny_engine(pair, width=4, max_batch_size=2), 4)
    params = SamplingParams(temperature=0, max_tokens=8)
    assert len(list(evaluation.run(["a", "b", "c", "d", "e"], params))) == 5


def test_what_is_no_task_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "evaluate", "--task", "nonsense") == 2
    assert "nonsense" in capsys.readouterr().err

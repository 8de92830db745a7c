"""Every drafter is measured on the same prompts at the whole block, and held against the unquantised one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_engines import acceptance, calibration
from dflash_engines.acceptance import measure, measure_drafter, ratio_of, standard_error
from dflash_engines.pipeline import Work
from dflash_engines.recipe import Acceptance
from dflash_serve.backend import RequestOutput
from dflash_serve.checkpoint.reader import load_weights, read_config
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from tests.support.tiny import tiny_drafter_config, write_quantized_drafter, write_tiny_drafter
from tests.support.tiny_target import write_tiny_pair

CONFIG = tiny_drafter_config(intermediate_size=64)


class FakeEngine:
    """Accepts 2 of 3 drafted tokens of an unquantised drafter, 1 of a quantised one that was decoded."""

    def __init__(self, deployment: Deployment, measured: list[Any]) -> None:
        assert deployment.drafter is not None
        self.measured, self.width = measured, 0
        self.drafter = Path(deployment.drafter.model)
        config, weights = load_weights(self.drafter)
        assert all(isinstance(weight, Tensor) for weight in weights.values())
        self.block_size = config.block_size

    def fixed(self, width: int) -> FakeEngine:
        self.width = width
        return self

    def stream(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> Any:
        self.measured.append((self.drafter.name, self.width, [prompt[0]["content"] for prompt in prompts]))
        statistics = AcceptanceStatistics()
        statistics.record(self.width, 2 if self.drafter.name == "drafter" else 1, steps=5)
        one = RequestOutput([1], [2, 3], "", "length", statistics)

        class Finished:
            def __iter__(self) -> Any:
                return iter(())

            def outputs(self) -> list[RequestOutput]:
                return [one for _ in prompts]

        return Finished()


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """A drafter, the same in FP8, and four prompts."""
    write_tiny_drafter(tmp_path / "drafter", CONFIG, dtype=torch.bfloat16)
    write_quantized_drafter(tmp_path / "drafter-fp8", "fp8", CONFIG)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(4)))
    (tmp_path / "out").mkdir()
    names = ("target", "drafter", "drafter-fp8")
    inputs = {"acceptance prompts": prompts, **{name: tmp_path / name for name in names}}
    return Work(tmp_path / "out", inputs, lambda line: None)


def test_quantised_drafters_are_held_against_the_unquantised_one(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    class FakeBackend:
        def engine(self, deployment: Deployment) -> FakeEngine:
            return FakeEngine(deployment, measured)

    monkeypatch.setattr(calibration, "embedded_backend", FakeBackend)
    deployment = Deployment.model_validate({"target": {"model": "t"}, "limits": {"max_model_len": 64}})
    found = measure(work, deployment, Acceptance(count=2, skip=1, max_tokens=8), ["fp8"])
    asked = ["prompt 1", "prompt 2"]
    assert measured == [("drafter", 4, asked), (".fp8", 4, asked)]
    assert found["bf16"] == {"acceptance_length": 3.0, "standard_error": 0.0, "steps": 10}
    assert found["fp8"] == {
        "acceptance_length": 2.0, "standard_error": 0.0, "steps": 10, "of_bf16": 0.6667, "interval": [0.6667, 0.6667],
        "enough": False,
    }  # fmt: skip
    assert list(work.folder.iterdir()) == []
    assert read_config(work.inputs["drafter-fp8"])[0] == CONFIG


def test_the_embedded_backend_measures_the_whole_block(tmp_path: Path) -> None:
    target, drafter = write_tiny_pair(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick brown fox"}\n' * 2)
    inputs = {"target": target, "drafter": drafter, "acceptance prompts": prompts}
    deployment = Deployment.model_validate({"target": {"model": "t"}, "limits": {"max_model_len": 128}})
    statistics = total(measure_drafter(deployment, target, drafter, ["the quick brown fox"] * 2, 12))
    assert statistics.widths is not None
    assert max(statistics.widths) == 4
    assert statistics.tokens is not None
    found = measure(Work(tmp_path, inputs, lambda line: None), deployment, Acceptance(count=2, max_tokens=12), [])
    assert isinstance(found["bf16"], dict)
    assert found["bf16"]["steps"] == statistics.verifications
    assert found["bf16"]["acceptance_length"] == round(statistics.acceptance_length or 0, 4)


def test_answers_without_a_step_are_no_measurement(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "measure_drafter", lambda *_: [AcceptanceStatistics()])
    with pytest.raises(UserError, match="no answer had a step to measure"):
        measure(work, Deployment.model_validate({"target": {"model": "t"}}), Acceptance(count=1), [])


def test_the_standard_error_is_that_of_the_mean() -> None:
    statistics = AcceptanceStatistics()
    statistics.record(4, 0, steps=8)
    statistics.record(4, 3, steps=8)
    # Lengths 1 and 4, half of the time each: deviation 1.5, over the root of 16.
    assert standard_error(statistics) == pytest.approx(1.5 / 4)
    assert standard_error(AcceptanceStatistics()) is None


def test_the_interval_of_a_ratio_is_narrow_where_prompts_differ_and_the_drafters_do_not() -> None:
    """200 repetitions of 64 prompts, some easy, some hard: 95 % of the intervals hold the truth."""
    rng = np.random.default_rng(0)

    def answers(accepts: float, ease: np.ndarray) -> list[AcceptanceStatistics]:
        found = []
        for easy in ease:
            one = AcceptanceStatistics()
            for accepted in rng.binomial(3, accepts * easy, 40):
                one.record(4, int(accepted))
            found.append(one)
        return found

    held, spread = 0, []
    truth = (1 + 3 * 0.55 * 0.6) / (1 + 3 * 0.6 * 0.6)  # 0.6: the mean ease
    for _ in range(200):
        ease = rng.uniform(0.2, 1.0, 64)
        _, least, most = ratio_of(answers(0.55, ease), answers(0.6, ease))
        held += least <= truth <= most
        spread.append(most - least)
    assert 180 <= held <= 199  # 0.95 +- 3 standard deviations
    assert np.median(spread) < 0.07

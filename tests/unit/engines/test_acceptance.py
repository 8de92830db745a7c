"""Every drafter is measured on the same prompts at the whole block, and held against the unquantised one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_engines import acceptance
from dflash_engines.acceptance import measure, measure_drafter, ratio_of, round_inputs
from dflash_engines.pipeline import Work
from dflash_engines.recipe import Acceptance
from dflash_serve.checkpoint.formats import E2M1, Format, QuantizedTensor
from dflash_serve.checkpoint.reader import load_weights, read_config
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.loader import load_drafter
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from tests.support.tiny import tiny_drafter_config, write_quantized_drafter, write_tiny_drafter
from tests.support.tiny_target import write_tiny_pair

FORMATS: list[Format] = ["fp8", "nvfp4"]
CONFIG = tiny_drafter_config(intermediate_size=64)


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

    def measure_one(
        deployment: Deployment, target: Path, drafter: Path, prompts: list[str], most: int, stored: Any
    ) -> Any:
        """2 of 3 drafted tokens of an unquantised drafter are accepted, 1 of a quantised one, which comes decoded."""
        assert all(isinstance(weight, Tensor) for weight in load_weights(drafter)[1].values())
        assert any(isinstance(weight, QuantizedTensor) for weight in stored.values()) == (drafter.name == ".fp8")
        measured.append((drafter.name, prompts, most))
        statistics = AcceptanceStatistics()
        statistics.record(4, 2 if drafter.name == "drafter" else 1, steps=5)
        return [statistics for _ in prompts]

    monkeypatch.setattr(acceptance, "measure_drafter", measure_one)
    deployment = Deployment.model_validate({"target": {"model": "t"}, "limits": {"max_model_len": 64}})
    found = measure(work, deployment, Acceptance(count=2, skip=1, max_tokens=8), ["fp8"])
    asked = ["prompt 1", "prompt 2"]
    assert measured == [("drafter", asked, 8), (".fp8", asked, 8)]
    assert found["bf16"] == {"acceptance_length": 3.0, "steps": 10}
    assert found["fp8"] == {
        "acceptance_length": 2.0, "steps": 10, "of_bf16": 0.6667, "interval": [0.6667, 0.6667], "enough": False,
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


@pytest.mark.parametrize("format", FORMATS)
def test_inputs_of_a_blocks_products_are_rounded_as_an_engine_does(format: Format, tmp_path: Path) -> None:
    """FP8: multiples of a static scale. NVFP4: 16 neighbours share a scale in FP8. The context stays as it is."""
    write_quantized_drafter(tmp_path / format, format, CONFIG)
    drafter = FusedDrafter(load_drafter(write_tiny_drafter(tmp_path / "plain", CONFIG)), compiled=False)
    _, weights = load_weights(tmp_path / format)
    seen: dict[str, Tensor] = {}
    round_inputs(drafter, weights)
    for name, module in drafter.named_modules():
        module.register_forward_pre_hook(lambda _, found, name=name: seen.update({name: found[0]}))
    x = torch.randn(6, CONFIG.hidden_size)
    drafter.context(x)
    drafter.get_submodule("layers.0.self_attn.qkv")(x)
    drafter.layers[1].mlp(x)
    assert torch.equal(seen["context"], x)
    assert {"layers.0.self_attn.qkv", "layers.1.mlp.gate_up", "layers.1.mlp.down_proj"} <= seen.keys()
    weight = weights["layers.0.self_attn.k_proj.weight"]
    assert isinstance(weight, QuantizedTensor)
    assert weight.input_scale is not None
    scale = weight.input_scale
    found = seen["layers.0.self_attn.qkv"]
    if format == "fp8":
        assert torch.equal(found, (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        return
    blocks = found.view(6, -1, 16)
    steps = (x.view(6, -1, 16).abs().amax(-1, keepdim=True) / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn).float()
    levels = (blocks / (steps * scale)).abs()
    assert float((levels[..., None] - torch.tensor(E2M1)).abs().amin(-1).max()) < 1e-5
    assert 0.02 < float((found - x).norm() / x.norm()) < 0.2


def test_answers_without_a_step_are_no_measurement(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "measure_drafter", lambda *_: [AcceptanceStatistics()])
    with pytest.raises(UserError, match="no answer had a step to measure"):
        measure(work, Deployment.model_validate({"target": {"model": "t"}}), Acceptance(count=1), [])


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

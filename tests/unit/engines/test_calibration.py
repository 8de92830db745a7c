"""A drafter is calibrated on the features that its target really gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_engines.calibration import AMAX, ANSWERS, OPENERS, answer, drafter_ranges, free_ranges, read_answers
from dflash_engines.pipeline import Work
from dflash_engines.recipe import Prompts
from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.deployment.description import Deployment
from dflash_serve.models.loader import load_drafter
from dflash_serve.speculation.params import SamplingParams
from tests.support.tiny_target import write_tiny_pair


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """A tiny target and drafter, and an answer of 20 tokens to a prompt of 8."""
    target, drafter = write_tiny_pair(tmp_path)
    folders = {"target": target, "drafter": drafter, "answers": tmp_path / "answers"}
    folders["answers"].mkdir()
    (tmp_path / "out").mkdir()
    line = {"prompt": list(range(4, 12)), "answer": [10 + n * 7 % 50 for n in range(20)]}
    (folders["answers"] / ANSWERS).write_text(json.dumps(line) + "\n")
    return Work(tmp_path / "out", folders, lambda line: None)


def test_features_have_the_range_of_the_targets_hidden_states(work: Work) -> None:
    from transformers import AutoModelForCausalLM

    assert drafter_ranges(work)["blocks"] == 4
    (prompt, reply), *_ = read_answers(work.inputs["answers"])
    oracle = AutoModelForCausalLM.from_pretrained(work.inputs["target"], dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = oracle(torch.tensor([prompt + reply]), output_hidden_states=True).hidden_states
    drafter = load_drafter(work.inputs["drafter"])
    wanted = torch.cat([hidden[layer + 1][0] for layer in drafter.config.target_layer_ids], dim=-1)
    torch.testing.assert_close(load_file(work.folder / AMAX)["fc"], wanted.abs().max(), rtol=1e-4, atol=1e-4)


def test_every_product_has_the_range_of_its_inputs(work: Work) -> None:
    drafter_ranges(work)
    ranges = load_file(work.folder / AMAX)
    products = {name.removesuffix(".weight") for name in load_drafter(work.inputs["drafter"]).state_dict()}
    assert {name for name in products if name.endswith("_proj")} <= ranges.keys()
    assert all(0 < float(largest) < float("inf") for largest in ranges.values())
    free_ranges(work)
    assert set(load_file(work.folder / AMAX)) <= ranges.keys()
    assert {float(largest) for largest in load_file(work.folder / AMAX).values()} == {448.0}


def test_answers_are_the_targets_own_and_kept_as_token_ids(work: Work) -> None:
    deployment = Deployment.model_validate({"target": {"model": "t"}, "limits": {"max_model_len": 256}})
    measured = answer(work, deployment, Prompts(count=2, max_tokens=9))
    answers = list(read_answers(work.folder))
    assert measured == {"prompts": 2, "answer_tokens": sum(len(reply) for _, reply in answers), "openers": True}
    engine = embedded_backend().engine(Deployment.model_validate({"target": {"model": str(work.inputs["target"])}}))
    for opener, (prompt, reply) in zip(OPENERS, answers, strict=False):
        assert prompt == engine.tokenize([{"role": "user", "content": opener}])
        stream = engine.stream([prompt], [SamplingParams(temperature=0, max_tokens=9)])
        list(stream)
        assert [output.token_ids for output in stream.outputs()] == [reply]

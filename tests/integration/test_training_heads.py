"""A plain backbone is given heads and trained further: every loss falls, each head has its part in it, and what is
written is read back in every dialect and drafts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_serve import SamplingParams
from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.loader import load_drafter, load_target
from dflash_serve.training.recipe import TrainingRecipe
from dflash_serve.training.run import new_trainer, run
from dflash_serve.training.shards import read_manifest
from dflash_serve.training.trainer import Scores
from tests.support.embedded import answers, tiny_engine
from tests.support.recipes import tiny_recipe, write_prompts
from tests.support.tiny_target import write_tiny_target

STEPS = 60
WITHOUT = {"markov": ("markov_w2",), "convolution": ("_conv.",), "confidence": ("confidence_head.",)}
"""By head: parts of the names of the tensors without which it is idle."""
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vanilla and confidence": (
        {"markov": {"kind": "vanilla", "rank": 8}, "confidence": {"with_markov": True}},
        {},
    ),
    "gated, as DSpark": (
        {"markov": {"kind": "gated", "rank": 8}, "confidence": {"with_markov": True}},
        {"soft_labels": 0.9, "weighting": "exponential"},
    ),
    "rnn and confidence of its own": (
        {"markov": {"kind": "rnn", "rank": 8}, "confidence": {"with_markov": False}},
        {},
    ),
    "two taps": ({"convolution": {"taps": 2, "group_size": 8}}, {}),
}


@dataclass(frozen=True)
class Ground:
    """A target, prompts and a plain drafter of few steps."""

    target: str
    prompts: Path
    backbone: str


def recipe(ground: Ground, drafter: Mapping[str, Any], init: str = "target", **training: Any) -> TrainingRecipe:
    settings = {"steps": STEPS, "validate_every": 30, "log_every": 10, "lr": 3e-3, **training}
    return tiny_recipe(ground.target, ground.prompts, {**drafter, "init": init}, **settings)


def train(asked: TrainingRecipe, output: Path) -> list[dict[str, Any]]:
    """The rows of its log."""
    assert run(asked, output, quiet=True)
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("ground")
    target, prompts = str(write_tiny_target(folder / "target")), write_prompts(folder / "prompts.jsonl")
    ground = Ground(target, prompts, str(folder / "plain/drafter"))
    train(recipe(ground, {}, steps=20), folder / "plain")
    return ground


def scored(asked: TrainingRecipe, output: Path, state: Mapping[str, torch.Tensor], head: str | None = None) -> Scores:
    """Scores over the training answers, slots weighted by place alone.

    Args:
        head: the one that is set back to how it began.
    """
    manifest = read_manifest(output / "data")
    assert manifest is not None
    by_place = asked.model_copy(update={"training": asked.training.model_copy(update={"weighting": "exponential"})})
    trainer = new_trainer(by_place, load_target(asked.target.model), manifest, output)
    began = trainer.drafter.state_dict()  # its heads are idle
    idle = {name: began[name] for name in state if head and any(part in name for part in WITHOUT[head])}
    trainer.drafter.load_state_dict({**state, **idle})
    trainer.validation = trainer.training
    return trainer.validate()


@pytest.mark.parametrize("name", CASES)
def test_every_head_learns_and_is_read_back(name: str, ground: Ground, tmp_path: Path) -> None:
    heads, training = CASES[name]
    asked, output = recipe(ground, heads, ground.backbone, **training), tmp_path / "out"
    rows = train(asked, output)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert ("confidence_loss" in rows[-1]) is ("confidence" in heads)
    if "confidence" in heads:
        assert rows[-1]["confidence_loss"] < rows[0]["confidence_loss"]
        assert rows[-1]["validation"]["confidence_loss"] > 0
    folder = output / "drafter"
    drafter = load_drafter(folder, dtype=torch.float32)
    whole = scored(asked, output, drafter.state_dict())
    for head in heads:
        without = scored(asked, output, drafter.state_dict(), head)
        if head == "confidence":
            assert (whole.confidence_loss or 0) < (without.confidence_loss or 0) - 0.005, "better than always one half"
        else:
            assert whole.loss < without.loss - 0.002, f"what it predicts is worse without its {head}"
    read_back_everywhere(folder, drafter, tmp_path)
    drafts_losslessly(ground, folder)


def read_back_everywhere(folder: Path, drafter: Drafter, scratch: Path) -> None:
    """In every dialect that has words for it; engines' own readers: `test_engine_readers`, tests/sglang, tests/vllm."""
    tensors, read = load_file(folder / "model.safetensors"), []
    for dialect in DIALECTS:
        try:
            write_drafter(scratch / dialect, drafter.config, tensors, dialect=dialect)
        except UserError as error:
            assert "has no way to write" in str(error)  # noqa: PT017 - either way is right
            continue
        back = load_drafter(scratch / dialect)
        assert back.config == drafter.config
        assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in tensors.items())
        read.append(dialect)
    expected = {"deepspec", "specforge", "speculators", "modelopt"} if drafter.config.markov else {"zlab", "modelopt"}
    assert set(read) >= expected


def drafts_losslessly(ground: Ground, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = ["the quick brown fox 3", "the quick"]
    plain, speculated = (
        answers(tiny_engine((Path(ground.target), folder), width=width), asked, params) for width in (1, 4)
    )
    assert [output.token_ids for output in speculated] == [output.token_ids for output in plain]


def test_anchor_first_slots_are_trained_from_the_target(ground: Ground, tmp_path: Path) -> None:
    heads = {"slots": "anchor-first", "markov": {"kind": "vanilla", "rank": 8}}
    rows = train(recipe(ground, heads), tmp_path / "out")
    assert rows[-1]["loss"] < rows[0]["loss"]
    raw = json.loads((tmp_path / "out/drafter/config.json").read_text())
    assert (raw["sample_from_anchor"], raw["block_size"]) == (True, 3)  # DeepSpec's gamma
    drafts_losslessly(ground, tmp_path / "out/drafter")


def test_heads_alone_are_trained_on_a_backbone_that_stays_as_it_is(ground: Ground, tmp_path: Path) -> None:
    heads = {"markov": {"kind": "vanilla", "rank": 8}}
    train(recipe(ground, heads, ground.backbone, heads_only=True), tmp_path / "out")
    before, after = (
        load_file(Path(folder) / "model.safetensors") for folder in (ground.backbone, tmp_path / "out/drafter")
    )
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert after["markov_head.markov_w2.weight"].any()
    with pytest.raises(UserError, match=r"training.heads_only: the drafter has neither a Markov nor a confidence head"):
        run(recipe(ground, {}, ground.backbone, heads_only=True), tmp_path / "other", quiet=True)
    with pytest.raises(UserError, match=r"with drafter.init: target the rest of the drafter would stay untrained"):
        run(recipe(ground, heads, heads_only=True), tmp_path / "other", quiet=True)

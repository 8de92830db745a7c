"""What SGLang is told of each kind of drafter, and what it is kept from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.deployment import COST_TABLE, Deployment
from dflash_serve.speculation.costs import CostModel
from dflash_sglang import SGLangBackend
from dflash_sglang.plugin.drafts import draft_problems
from tests.support.heads import HEADS
from tests.support.tiny import random_tensors, tiny_drafter_config
from tests.support.tiny_target import SPECIALS, write_tiny_target


def deployed(folder: Path, name: str, **speculation: object) -> Deployment:
    target = write_tiny_target(folder / "target", family="qwen3")
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    fields = {"num_target_layers": 4, "target_layer_ids": (0, 2), "mask_token_id": SPECIALS.index("<mask>")}
    config = tiny_drafter_config(block_size=8, vocab_size=vocab_size, **fields, **HEADS[name])
    dialect = "speculators" if config.draft_vocabulary else "modelopt"
    write_drafter(folder / "drafter", config, random_tensors(config), dialect=dialect)
    models = {"target": {"model": str(target)}, "drafter": {"model": str(folder / "drafter")}}
    return Deployment.model_validate({**models, "speculation": speculation})


def flags_of(deployment: Deployment, folder: Path) -> dict[str, str]:
    argv = SGLangBackend().command(deployment, folder).argv
    return {word: value for word, value in pairwise(argv) if word.startswith("--speculative")}


@pytest.mark.parametrize("name", ["vanilla Markov", "gated Markov", "rnn Markov", "vanilla Markov, fill-in"])
def test_dspark_is_started_with_both_counts(name: str, tmp_path: Path) -> None:
    deployment = deployed(tmp_path, name)
    backend = SGLangBackend()
    assert backend.check(deployment) == []
    flags = flags_of(deployment, tmp_path / "prepared")
    assert flags["--speculative-algorithm"] == "DSPARK"
    assert flags["--speculative-num-draft-tokens"] == "8"
    assert flags["--speculative-dspark-block-size"] == "7"
    backend.prepare(deployment, tmp_path / "prepared")
    raw = json.loads((tmp_path / "prepared" / "draft" / "config.json").read_text())
    shifted = "fill-in" not in name
    expected = {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": shifted, "block_size": 7 if shifted else 8}
    assert expected.items() <= raw.items()
    assert raw["markov_rank"] == 6, "where SGLang's models/dspark.py looks"
    width = {choice.key: choice.value for choice in backend.preview(deployment, tmp_path).choices}["speculation.width"]
    assert width == "8"


@pytest.mark.parametrize("name", ["DFlash2", "convolution", "plain"])
def test_the_others_are_dflash(name: str, tmp_path: Path) -> None:
    deployment = deployed(tmp_path, name)
    assert SGLangBackend().check(deployment) == []
    flags = flags_of(deployment, tmp_path / "prepared")
    assert flags["--speculative-algorithm"] == "DFLASH"
    assert flags["--speculative-num-draft-tokens"] == "8"
    assert "--speculative-dspark-block-size" not in flags


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reduced vocabulary", "SGLang would skip d2t and lm_head"),
        ("anchor-first", "anchor-first slots without a Markov head"),
        ("Markov, reduced", "SGLang would skip d2t and lm_head"),
    ],
)
def test_what_sglang_would_get_wrong_is_refused_before_and_in_its_process(
    name: str, words: str, tmp_path: Path
) -> None:
    deployment = deployed(tmp_path, name)
    assert any(words in problem.what for problem in SGLangBackend().check(deployment))
    arguments = SimpleNamespace(
        speculative_draft_model_path=str(tmp_path / "drafter"),
        speculative_draft_model_revision=None,
        speculative_num_draft_tokens=8,
        speculative_dflash_block_size=None,
    )
    if "Markov" not in name:  # DSPARK's architectures are not DFLASH's to check
        assert any(words in problem.what for problem in draft_problems(arguments))


@pytest.mark.parametrize(
    ("name", "width", "fine"), [("DFlash2", 3, False), ("DFlash2", 8, True), ("convolution", 3, True)]
)
def test_a_width_that_does_not_run_is_a_problem(name: str, width: int, fine: bool, tmp_path: Path) -> None:
    problems = SGLangBackend().check(deployed(tmp_path, name, width=width))
    assert ([problem.where for problem in problems] == []) is fine
    if not fine:
        assert "verifies whole blocks of 8 slots with a DFlash2 drafter, not 3" in problems[0].what


def test_dsparks_planner_gets_our_costs_where_it_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = CostModel(target={1: 0.010, 8: 0.011, 64: 0.020}, draft={1: 0.001, 8: 0.002}, target_context=1e-9)
    (tmp_path / "cost.json").write_text(cost.model_dump_json())
    deployment, flag = deployed(tmp_path, "Markov and confidence"), "--speculative-dspark-sps-table-path"
    monkeypatch.setenv(COST_TABLE, str(tmp_path / "cost.json"))
    assert flag not in flags_of(deployment, tmp_path / "prepared"), "SGLang's default verifies whole blocks"
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    assert flags_of(deployment, tmp_path / "prepared")[flag] == str(tmp_path / "prepared" / "planner.json")
    SGLangBackend().prepare(deployment, tmp_path / "prepared")
    table = json.loads((tmp_path / "prepared" / "planner.json").read_text())
    assert table["m_probes"] == [1, 8, 64, 48 * 8]
    for rows, theta in zip(table["m_probes"], table["theta_seconds"], strict=True):
        for requests, alpha in zip(table["bs_probes"], table["alpha_seconds"], strict=True):
            told = table["bias_seconds"] + alpha + theta
            assert told == pytest.approx(cost.target_seconds(rows) + cost.draft_seconds(requests))
    without = deployed(tmp_path / "without", "vanilla Markov")
    assert flag not in flags_of(without, tmp_path / "prepared"), "no confidence, nothing to plan by"

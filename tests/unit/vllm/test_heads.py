"""What vLLM is told of each kind of drafter, and what it is kept from. Its GPU runner alone has DSpark and DFlash2."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.checkpoint.reader import open_checkpoint
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.deployment.description import Deployment, Hardware
from dflash_vllm import VLLMBackend
from dflash_vllm.drafter_rules import V1_VARIABLE
from tests.support.heads import HEADS
from tests.support.tiny import FULL, SLIDING, SLIDING_BOTH_WAYS, random_tensors, tiny_drafter_config
from tests.support.tiny_target import SPECIALS, write_tiny_target


def deployed(folder: Path, heads: dict[str, Any], **more: Any) -> Deployment:
    target = write_tiny_target(folder / "target", family="qwen3")
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    fields = {"num_target_layers": 4, "target_layer_ids": (0, 2), "mask_token_id": SPECIALS.index("<mask>")}
    config = tiny_drafter_config(block_size=8, vocab_size=vocab_size, **{**fields, **heads})
    dialect = "speculators" if config.draft_vocabulary else "modelopt"
    write_drafter(folder / "drafter", config, random_tensors(config), dialect=dialect)
    models = {"target": {"model": str(target)}, "drafter": {"model": str(folder / "drafter")}}
    return Deployment.model_validate({**models, **more})


def whats(deployment: Deployment) -> str:
    found = VLLMBackend().launch(deployment).problems
    assert all("\n" not in str(problem) and problem.do for problem in found)
    return "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("name", "method", "architecture", "whole"),
    [
        ("plain", "dflash", "DFlashDraftModel", False),
        ("reduced vocabulary", "dflash", "DFlashSpeculator", False),
        ("DFlash2", "dflash", "DFlash2DraftModel", True),
        ("vanilla Markov", "dspark", "Qwen3DSparkModel", True),
        ("vanilla Markov, fill-in", "dspark", "Qwen3DSparkModel", True),
        ("Markov and confidence", "dspark", "Qwen3DSparkModel", True),
    ],
)
def test_method_form_and_width_follow_the_heads_and_the_drafter_stays_the_same(
    name: str, method: str, architecture: str, whole: bool, tmp_path: Path
) -> None:
    deployment, folder = deployed(tmp_path, dict(HEADS[name])), tmp_path / "prepared"
    launch = VLLMBackend().launch(deployment)
    assert launch.problems == []
    launch.prepare(folder)
    written, given = open_checkpoint(folder / "draft"), open_checkpoint(tmp_path / "drafter")
    assert (written.problems, written.config) == ([], given.config)
    raw = json.loads((folder / "draft/config.json").read_text())
    assert raw["architectures"] == [architecture]
    assert raw["sample_from_anchor"] is (written.config is not None and written.config.slots == "anchor-first")
    if name == "reduced vocabulary":  # vLLM renames d2t and asks for a head of its own
        assert {"d2t", "lm_head.weight"} <= written.headers.keys()
        assert (raw["draft_vocab_size"], raw["sliding_window_non_causal"]) == (40, True)
    argv = launch.command(folder).argv
    told = json.loads(dict(pairwise(argv))["--speculative-config"])
    assert (told["method"], told["num_speculative_tokens"]) == (method, 7), "B - 1, whatever the slots"
    assert ("num_speculative_tokens_per_batch_size" not in told) is whole
    assert ("--scheduler-cls" not in argv) is whole
    trimmed = VLLMBackend().launch(deployment.model_copy(update={"hardware": Hardware(gpu="h100")})).command(folder)
    told = json.loads(dict(pairwise(trimmed.argv))["--speculative-config"])
    assert told["enable_adaptive_verification"] is True
    assert ("num_speculative_tokens_per_batch_size" not in told) is whole
    choice = {choice.key: choice for choice in launch.choices}["speculation.width"]
    assert (choice.value == "8") is whole
    assert ("whole blocks, the width never changes" in choice.why) is whole


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (dict(HEADS["gated Markov"]), "a gated Markov head: vLLM 0.32 and 0.33 have vanilla ones only"),
        (dict(HEADS["Markov, reduced"]), "a rnn Markov head"),
        (dict(HEADS["anchor-first"]), "read them in method dspark only"),
        (dict(HEADS["convolution"]), "convolutions without a selector: vLLM 0.32 and 0.33 build both or neither"),
        ({**HEADS["convolution"], **HEADS["vanilla Markov"]}, "convolutions beside a Markov head"),
        ({"confidence": {"with_markov": False}}, "a confidence head without a Markov head"),
        ({**HEADS["vanilla Markov"], "final_logit_softcap": 30.0}, "soft-capped before the Markov head's bias"),
        ({**HEADS["vanilla Markov"], "embedding_scale": 2.0}, "vLLM ignores for DSpark drafters"),
        ({"draft_vocabulary": 40, "layers": (FULL, SLIDING)}, "vLLM would make all of them causal"),
        (
            {**HEADS["vanilla Markov"], "draft_vocabulary": 40, "layers": (SLIDING_BOTH_WAYS, SLIDING_BOTH_WAYS)},
            "vLLM makes them causal",
        ),
    ],
)
def test_what_vllm_has_not_or_would_get_wrong_is_refused_by_name(
    heads: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in whats(deployed(tmp_path, heads))


@pytest.mark.parametrize("name", ["DFlash2", "vanilla Markov"])
def test_heads_of_the_second_model_runner_are_refused_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = dict(HEADS[name])
    assert "vLLM's V1 model runner has not" in whats(deployed(tmp_path / "cpu", heads, hardware={"gpu": "none"}))
    monkeypatch.setenv(V1_VARIABLE, "0")
    assert "vLLM's V1 model runner has not" in whats(deployed(tmp_path / "v1", heads))


def test_a_reduced_vocabulary_runs_on_a_cpu_with_our_widths(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, dict(HEADS["reduced vocabulary"]), hardware={"gpu": "none"})
    assert whats(deployment) == ""
    assert "--scheduler-cls" in VLLMBackend().launch(deployment).command(tmp_path).argv


@pytest.mark.parametrize(("width", "fine"), [(3, False), (8, True), ("auto", True), ("off", True)])
def test_a_width_that_does_not_run_is_a_problem(width: int | str, fine: bool, tmp_path: Path) -> None:
    found = whats(deployed(tmp_path, dict(HEADS["DFlash2"]), speculation={"width": width}))
    assert (found == "") is fine
    if not fine:
        assert "vLLM verifies whole blocks of 8 slots with a DFlash2 drafter, not 3" in found


def test_a_dflash2_drafter_keeps_its_scale(tmp_path: Path) -> None:
    assert whats(deployed(tmp_path, {**HEADS["DFlash2"], "embedding_scale": 2.0, "output_multiplier": 0.5})) == ""


@pytest.mark.parametrize(("gpu", "untrimmed"), [("a100", "this is SM80"), ("h200", None)])
@pytest.mark.parametrize("name", ["DFlash2", "vanilla Markov", "plain"])
def test_auto_follows_the_load_where_vllm_trims_blocks_or_runs_our_widths(
    name: str, gpu: str, untrimmed: str | None, tmp_path: Path
) -> None:
    launch = VLLMBackend().launch(deployed(tmp_path, dict(HEADS[name]), hardware=Hardware(gpu=gpu)))
    if untrimmed is None or name == "plain":
        assert launch.never_narrow is None
    else:
        assert launch.drafter is not None
        assert f"whole blocks with a {launch.drafter.family} drafter: vLLM" in str(launch.never_narrow)
        assert untrimmed in str(launch.never_narrow)

"""Conversions between kinds of drafters: what they promise, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dflash_serve.checkpoint.conversions import differing_rows, with_full_vocabulary, with_markov_head
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.cli.main import app
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import propose
from dflash_serve.models.loader import head_weight, load_drafter
from tests.support.heads import HEADS, SELECTOR, SHIFTED, VANILLA
from tests.support.paper_models import write_paper_target
from tests.support.tiny import random_tensors, tiny_drafter_config
from tests.support.tiny_target import write_tiny_pair

REDUCED = tiny_drafter_config(draft_vocabulary=40)


def copied(head: Tensor) -> dict[str, Tensor]:
    """A reduced drafter whose head is a copy of the target's rows."""
    tensors = random_tensors(REDUCED)
    ids = torch.arange(40) + tensors["d2t"]
    return {**tensors, "lm_head.weight": head[ids].clone()}


def test_a_copied_head_is_dropped_and_every_old_candidate_keeps_its_logit() -> None:
    head = torch.randn(96, 32)
    config, tensors = with_full_vocabulary(REDUCED, copied(head), head)
    assert config == tiny_drafter_config()
    assert tensors.keys() == random_tensors(config).keys()


def test_rounding_to_bfloat16_is_no_difference_and_training_is() -> None:
    head = torch.randn(96, 32)
    tensors = copied(head)
    ids = torch.arange(40) + tensors["d2t"]
    assert differing_rows(head[ids].bfloat16(), head, ids) == 0
    tensors["lm_head.weight"][[3, 17, 39], 5] *= 1.05
    with pytest.raises(UserError, match="3 of 40 rows of lm_head are not the target's"):
        with_full_vocabulary(REDUCED, tensors, head)


def test_a_markov_head_keeps_its_biases_and_knows_nothing_of_other_tokens() -> None:
    head = torch.randn(96, 32)
    small = tiny_drafter_config(draft_vocabulary=40, markov=VANILLA)
    tensors = {**random_tensors(small), "lm_head.weight": copied(head)["lm_head.weight"]}
    config, whole = with_full_vocabulary(small, tensors, head)
    ids = torch.arange(40) + tensors["d2t"]
    w2 = whole["markov_head.markov_w2.weight"]
    assert w2.shape == (96, 6)
    assert torch.equal(w2[ids], tensors["markov_head.markov_w2.weight"])
    assert int(w2.any(dim=1).sum()) == 40
    assert config.draft_vocabulary is None


@pytest.mark.parametrize("fresh", [False, True])
@torch.inference_mode()
def test_an_added_markov_head_drafts_as_before(fresh: bool, tmp_path: Path) -> None:
    """DeepSpec's plain drafters, in a form that SGLang's DSPARK loads."""
    before = tiny_drafter_config(**SHIFTED)
    tensors = random_tensors(before)
    config, after = with_markov_head(before, tensors, rank=16, fresh=fresh)
    write_drafter(tmp_path / "drafter", config, after, dialect="deepspec")
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    wanted = {"markov_rank": 16, "markov_head_type": "vanilla", "sample_from_anchor": True, "block_size": 3}
    assert wanted.items() <= raw.items()
    drafter, hidden, head = load_drafter(tmp_path / "drafter"), torch.randn(6, 32), torch.randn(96, 32)
    assert drafter.markov_head is not None
    assert bool(drafter.markov_head.markov_w1.weight.any()) is fresh
    plain = (hidden @ head.T).argmax(-1).view(2, 3).tolist()
    assert propose(drafter, lambda rows: rows @ head.T, hidden, [1, 2], [3, 3], [None, None]) == plain


@pytest.mark.parametrize(
    ("heads", "words"),
    [({"markov": VANILLA}, "a Markov head already"), ({"selector": SELECTOR}, "a candidate selector")],
)
def test_a_second_head_is_refused(heads: dict[str, object], words: str) -> None:
    config = tiny_drafter_config(**heads)
    with pytest.raises(UserError, match=words):
        with_markov_head(config, random_tensors(config), rank=4, fresh=False)


def test_another_targets_head_is_refused() -> None:
    with pytest.raises(UserError, match=re.escape("the target's head is [96, 64]")):
        with_full_vocabulary(REDUCED, copied(torch.randn(96, 32)), torch.randn(96, 64))
    with pytest.raises(UserError, match="has all of the target's tokens"):
        with_full_vocabulary(tiny_drafter_config(), {}, torch.randn(96, 32))


@pytest.mark.parametrize(("name", "to"), [("plain", "zlab"), ("DFlash2", "zlab"), ("vanilla Markov", "deepspec")])
def test_a_padded_vocabulary_is_cut_to_the_targets(name: str, to: str, tmp_path: Path) -> None:
    config = tiny_drafter_config(**HEADS[name])
    tensors = random_tensors(config)
    write_drafter(tmp_path / "padded", config, tensors, dialect=to)
    target = write_paper_target(tmp_path / "target", vocab_size=90, hidden_size=32)
    argv = ["convert", str(tmp_path / "padded"), str(tmp_path / "cut"), "--to", to, "--target", str(target)]
    assert CliRunner().invoke(app, argv).exit_code == 0
    checkpoint = open_checkpoint(tmp_path / "cut")
    assert (checkpoint.problems, checkpoint.config) == ([], config.model_copy(update={"vocab_size": 90}))
    cut = load_tensors(checkpoint)
    assert all(torch.equal(cut[name], tensor[: len(cut[name])]) for name, tensor in tensors.items())
    assert {len(cut[name]) for name, tensor in tensors.items() if len(tensor) == 96} <= {90}


def test_the_verb_compares_with_the_targets_own_head(tmp_path: Path) -> None:
    target, _ = write_tiny_pair(tmp_path / "pair")
    head = head_weight(str(target))
    config = tiny_drafter_config(
        draft_vocabulary=50, num_target_layers=4, target_layer_ids=(0, 2), mask_token_id=3, vocab_size=len(head)
    )
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = head[torch.arange(50) + tensors["d2t"]].clone()
    write_drafter(tmp_path / "reduced", config, tensors, dialect="speculators")
    argv = ["convert", str(tmp_path / "reduced"), str(tmp_path / "whole"), "--to", "zlab", "--full-vocabulary"]
    refused = CliRunner().invoke(app, argv)
    assert isinstance(refused.exception, UserError)
    assert "give --target" in str(refused.exception)
    assert not (tmp_path / "whole").exists()
    done = CliRunner().invoke(app, [*argv, "--target", str(target)])
    assert done.exit_code == 0, done.output
    checkpoint = open_checkpoint(tmp_path / "whole")
    assert checkpoint.config is not None
    assert checkpoint.config.draft_vocabulary is None
    assert load_tensors(checkpoint).keys() == tensors.keys() - {"d2t", "lm_head.weight"}

"""Every bad drafter with heads is refused before launch, in one line with the fault, its place and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.reader import DIALECTS, load_tensors, open_checkpoint, read_config
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import UserError
from tests.support.heads import CONVOLUTION, GATED, HEADS, SELECTOR, SHIFTED, VANILLA
from tests.support.tiny import edit_json, problems_of, random_tensors, spread_map, tiny_drafter_config
from tests.unit.checkpoint.test_bad_checkpoints import edit_weights, refused

REDUCED: dict[str, object] = {"draft_vocabulary": 40}
DFLASH2: dict[str, object] = {"convolution": CONVOLUTION, "selector": SELECTOR}
CONFIDENT = HEADS["Markov and confidence"]
IDS = torch.arange(40)


def written(folder: Path, dialect: str, heads: dict[str, object]) -> Path:
    config = tiny_drafter_config(**heads)
    write_drafter(folder, config, random_tensors(config), dialect=dialect)
    return folder


BAD_CONFIGS = [
    ("deepspec", CONFIDENT, {"markov_head_type": None}, "markov_rank is 6, but there is no markov_head_type"),
    ("deepspec", CONFIDENT, {"markov_head_type": "lstm"}, "markov_head_type is 'lstm', which is not supported"),
    ("deepspec", CONFIDENT, {"markov_rank": -1}, "markov_rank is -1, not a whole number from 0 on"),
    ("deepspec", CONFIDENT, {"markov_rank": 0}, "reads Markov embeddings, but there is no Markov head"),
    ("deepspec", CONFIDENT, {"confidence_head_with_markov": None}, "without confidence_head_with_markov"),
    ("deepspec", CONFIDENT, {"use_confidence_head": False}, "enable_confidence_head is True but use_confidence_head"),
    ("deepspec", CONFIDENT, {"sample_from_anchor": "yes"}, "sample_from_anchor is 'yes', not true or false"),
    ("deepspec", CONFIDENT, {"target_layer_ids": [-1, 3, 5]}, "target_layer_ids is [-1, 3, 5]"),
    ("deepspec", CONFIDENT, {"architectures": ["Gemma4DSparkModel"]}, "'Gemma4DSparkModel' is not supported"),
    ("deepspec", CONFIDENT, {"block_size": 0}, "block_size is 0, not a whole number from 1 on"),
    ("specforge", CONFIDENT, {"dflash_config.attention_mode": "mla"}, "attention_mode = 'mla'"),
    ("specforge", CONFIDENT, {"dflash_config.new_thing": 1}, "unknown key dflash_config.new_thing"),
    ("specforge", CONFIDENT, {"dflash_config.markov_rank": 8}, "proj.weight has shape [1, 38]"),
    ("modelopt", CONFIDENT, {"dflash_config.shift_label": False}, "sample_from_anchor is True but"),
    ("modelopt", {"markov": GATED, **SHIFTED}, {"dflash_config.markov_head_type": "rnn"}, "markov_head.gate_proj"),
    ("zlab", DFLASH2, {"dflash_config.conv_kernel_size": None}, "conv_group_size without conv_kernel_size"),
    ("zlab", DFLASH2, {"dflash_config.selector_top_k": None}, "selector_rank without selector_top_k"),
    ("zlab", DFLASH2, {"dflash_config.conv_group_size": 7}, "conv_group_size 7 does not divide hidden_size 32"),
    ("zlab", DFLASH2, {"dflash_config.conv_kernel_size": 5}, "conv_kernel_size 5 is more than the block's 4"),
    ("zlab", DFLASH2, {"dflash_config.selector_top_k": 97}, "selector_top_k 97 is more than the vocabulary of 96"),
    ("zlab", DFLASH2, {"sample_from_anchor": True}, "a candidate selector with anchor-first slots"),
    ("zlab", DFLASH2, {"dflash_config.selector_rank": 7}, "hidden_projection.weight has shape"),
    ("speculators", DFLASH2, {"draft_vocab_size": 40}, "a candidate selector with a reduced draft vocabulary"),
    ("speculators", REDUCED, {"draft_vocab_size": 97}, "draft_vocab_size 97 is more than vocab_size 96"),
    ("speculators", REDUCED, {"draft_vocab_size": 41}, "d2t has shape [40], config.json asks for [41]"),
    ("speculators", REDUCED, {"draft_vocab_size": 96}, "d2t [40] maps a reduced draft vocabulary"),
    (
        "speculators", CONFIDENT,
        {"sample_from_anchor": None, "speculators_config.proposal_methods": [{"speculative_tokens": 5}]},
        "no sample_from_anchor, and speculative_tokens [5] beside block_size 3 does not tell",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "heads", "change", "words"), BAD_CONFIGS)
def test_a_config_that_cannot_be_honoured_is_refused(
    dialect: str, heads: dict[str, object], change: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "drafter", dialect, heads)
    assert problems_of(folder) == []
    edit_json(folder / "config.json", change)
    refused(folder, words)


BAD_MAPS: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], tuple[str, ...], str]] = [
    (lambda t: {"d2t": t["d2t"] + IDS}, (), "d2t holds target ids, not differences"),
    (lambda t: {"d2t": t["d2t"] + 90}, (), "draft ids outside the vocabulary of 96"),
    (lambda t: {"d2t": -IDS}, (), "d2t does not rise with the draft id"),
    (lambda t: {"d2t": t["d2t"].float()}, (), "tensor d2t is F32, not I64"),
    (lambda t: {"d2t": spread_map(41, 96)}, (), "tensor d2t has shape [41], config.json asks for [40]"),
    (lambda t: {}, ("d2t",), "tensor d2t [40] is missing"),
    (lambda t: {}, ("lm_head.weight",), "tensor lm_head.weight [40, 32] is missing"),
    (lambda t: {"t2d": torch.ones(96, dtype=torch.bool)}, (), "t2d marks 96 tokens but d2t maps 40"),
    (lambda t: {"t2d": torch.zeros(96, dtype=torch.bool)}, (), "t2d marks 0 tokens"),
    (lambda t: {"t2d": t["t2d"].roll(1)}, (), "t2d and d2t name different tokens"),
    (lambda t: {"t2d": t["t2d"].float()}, (), "tensor t2d is F32 [96], not BOOL [96]"),
]


@pytest.mark.parametrize(("change", "remove", "words"), BAD_MAPS)
def test_a_map_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], remove: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "drafter", "speculators", REDUCED)
    edit_weights(folder, change(load_file(folder / "model.safetensors")), remove)
    refused(folder, words)


@pytest.mark.parametrize("name", ["candidate_selector.successor_codebook", "layers.1.mlp_conv.base_kernel"])
def test_a_head_of_zeros_is_found(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "zlab", DFLASH2)
    edit_weights(folder, {name: torch.zeros_like(random_tensors(tiny_drafter_config(**DFLASH2))[name])})
    assert [problem.what for problem in problems_of(folder)] == [f"nothing but zeros in {name}"]


@pytest.mark.parametrize("name", HEADS)
def test_every_dialect_writes_a_head_so_that_it_is_read_back_or_says_that_it_cannot(name: str, tmp_path: Path) -> None:
    config = tiny_drafter_config(**HEADS[name])
    tensors, able = random_tensors(config), 0
    for dialect in DIALECTS:
        folder = tmp_path / dialect
        try:
            write_drafter(folder, config, tensors, dialect=dialect)
        except UserError as error:
            assert "has no way to write" in str(error)  # noqa: PT017 - either way is right
            assert not folder.exists()
            continue
        able += 1
        checkpoint = open_checkpoint(folder)
        assert checkpoint.problems == []
        assert checkpoint.config == config
        back = load_tensors(checkpoint)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert able >= 1 + (name in ("plain", "anchor-first", "DFlash2"))


@pytest.mark.parametrize(
    ("tokens", "slots", "block"), [(3, "anchor-first", 4), (2, "fill-in", 3)], ids=["as many as rows", "one fewer"]
)
def test_a_speculators_dspark_without_the_key_is_read_by_what_it_says_it_drafts(
    tokens: int, slots: str, block: int, tmp_path: Path
) -> None:
    """speculators takes the missing key as true, vLLM as false."""

    folder = written(tmp_path / "drafter", "speculators", dict(CONFIDENT))
    methods = {"speculators_config.proposal_methods": [{"speculative_tokens": tokens}]}
    edit_json(folder / "config.json", {"sample_from_anchor": None, **methods})
    config, _ = read_config(folder)
    assert (config.slots, config.block_size) == (slots, block)


def test_a_missing_switch_is_settled_by_the_tensors(tmp_path: Path) -> None:
    """SGLang takes a missing enable_confidence_head as on, speculators as off."""

    for name, expected in (("Markov and confidence", True), ("vanilla Markov", False)):
        folder = written(tmp_path / name, "deepspec", dict(HEADS[name]))
        edit_json(folder / "config.json", {"enable_confidence_head": None})
        checkpoint = open_checkpoint(folder)
        assert checkpoint.problems == []
        assert checkpoint.config is not None
        assert (checkpoint.config.confidence is not None) is expected


def test_modelopts_names_for_dspark_are_known(tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "modelopt", dict(CONFIDENT))
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj"): tensor.clone()
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    change = {"dflash_config.use_confidence_head": True, "dflash_config.enable_confidence_head": None}
    edit_json(folder / "config.json", {**change, "dflash_config.confidence_head_with_markov": None})
    assert problems_of(folder) == []


def test_vanilla_is_what_a_speculators_export_without_a_kind_has(tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "speculators", {"markov": VANILLA, **SHIFTED})
    edit_json(folder / "config.json", {"markov_head_type": None})
    assert problems_of(folder) == []

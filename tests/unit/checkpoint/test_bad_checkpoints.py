"""Every bad drafter is refused before launch, in one line with the fault, its place and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.reader import open_checkpoint, read_config
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter
from tests.support.heads import CONVOLUTION, GATED, HEADS, RNN, SELECTOR, SHIFTED, VANILLA
from tests.support.tiny import (
    FULL,
    SLIDING,
    edit_json,
    problems_of,
    random_tensors,
    spread_map,
    tiny_drafter_config,
    write_tiny_drafter,
)

REDUCED: dict[str, object] = {"draft_vocabulary": 40}
DFLASH2: dict[str, object] = {"convolution": CONVOLUTION, "selector": SELECTOR}
CONFIDENT = HEADS["Markov and confidence"]
IDS = torch.arange(40)
Q = "layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_drafter(tmp_path / "drafter")


def refused(folder: Path, *words: str) -> None:
    """Loading raises one line with these words, and `problems_of` finds the same."""
    with pytest.raises(UserError) as caught:
        load_drafter(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert any(all(word in str(problem) for word in words) for problem in problems_of(folder))


def written(folder: Path, dialect: str, heads: Mapping[str, object]) -> Path:
    return write_tiny_drafter(folder, tiny_drafter_config(**heads), dialect=dialect)


def edit_weights(folder: Path, change: dict[str, Tensor], remove: tuple[str, ...] = ()) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items() if name not in remove}, folder / "model.safetensors"
    )


BAD_WEIGHTS: list[tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]] = [
    ({}, (Q,), (f"tensor {Q} [64, 32] is missing",)),
    ({"fc.bias": torch.zeros(32)}, (), ("tensor fc.bias [32] is not part of a DFlash drafter",)),
    ({Q: torch.zeros(63, 32)}, (), (Q, "[63, 32]", "[64, 32]")),
    ({"encoder.fc.weight": torch.zeros(32, 96)}, (), ("tensor fc.weight is there twice", "encoder.fc.weight")),
    ({Q: torch.zeros(64, 32, dtype=torch.int8)}, (), ("the weights are quantised", Q)),
]
"""Tensors to change, tensors to remove -> the words of the error."""
OTHER_DRAFTERS = {
    "candidate_selector.successor_codebook": "DFlash2 head, which config.json does not have",
    "layers.0.mlp_conv.base_kernel": "DFlash2 head",
    "markov_w1.weight": "DSpark head, which config.json does not have",
    "prefix_gru.weight_ih_l0": "Domino head",
    "lilicorr.layers.0.weight": "LiLiCorr head",
    "d2t": "reduced draft vocabulary",
    "t2d": "reduced draft vocabulary",
    "embed_tokens.weight": "a drafter with an embedding of its own is not supported",
}
BAD_WEIGHTS += [
    (
        {name: torch.zeros(2, 2, dtype=torch.int64 if "2" in name[:3] else torch.float32)},
        (),
        (f"tensor {name} [2, 2]", words),
    )
    for name, words in OTHER_DRAFTERS.items()
]
QUANTISED = {
    "layers.0.mlp.up_proj.weight_packed": torch.zeros(48, 4, dtype=torch.int32),
    "layers.0.mlp.up_proj.weight_scale": torch.zeros(1),
    "layers.0.mlp.up_proj.weight": torch.zeros(48, 32, dtype=torch.float8_e4m3fn),
    "layers.0.mlp.up_proj.qweight": torch.zeros(4, 48, dtype=torch.int32),
}
BAD_WEIGHTS += [({name: tensor}, (), ("the weights are quantised", name)) for name, tensor in QUANTISED.items()]


@pytest.mark.parametrize(("change", "remove", "words"), BAD_WEIGHTS, ids=[str(words) for *_, words in BAD_WEIGHTS])
def test_a_tensor_that_does_not_belong_there_is_named(
    change: dict[str, Tensor], remove: tuple[str, ...], words: tuple[str, ...], folder: Path
) -> None:
    edit_weights(folder, change, remove)
    refused(folder, *words)


def test_an_fc_that_does_not_match_the_layer_ids_says_so(folder: Path) -> None:
    edit_json(folder / "config.json", {"dflash_config.target_layer_ids": [1, 3]})
    refused(folder, "fc.weight", "[32, 96]", "[32, 64]", "2 target_layer_ids x hidden_size")


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [("nan", torch.float32), ("inf", torch.bfloat16), ("-inf", torch.float32), ("nan", torch.bfloat16)],
)
def test_a_tensor_that_is_not_finite_is_named(bad: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter", dtype=dtype)
    norm = torch.ones(32, dtype=dtype)
    norm[5] = float(bad)
    edit_weights(folder, {"norm.weight": norm})
    refused(folder, "tensor norm.weight has 1 values that are NaN or infinite, of 32")


def replaced(folder: Path, weight_map: dict[str, str]) -> None:
    """The weights go out of the folder; an index of shards takes their place."""
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def rewritten(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


BAD_FILES: list[tuple[Callable[[Path], object], tuple[str, ...]]] = [
    (lambda folder: rewritten(folder, lambda data: data[:3]), ("model.safetensors", "not a whole safetensors file")),
    (lambda folder: rewritten(folder, lambda data: data[:100]), ("not a whole safetensors file",)),
    (lambda folder: rewritten(folder, lambda data: data[:-1]), ("not a whole safetensors file",)),
    (lambda folder: rewritten(folder, lambda data: data + b"x"), ("not a whole safetensors file",)),
    (lambda folder: (folder / "model.safetensors").unlink(), ("no model.safetensors",)),
    (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        ("only pytorch_model.bin", "pickle"),
    ),
    (lambda folder: (folder / "mask_embedding.pt").write_bytes(b""), ("mask_embedding.pt", "never loaded")),
    (
        lambda folder: replaced(folder, {"a": "model-1-of-2.safetensors"}),
        ("shard 'model-1-of-2.safetensors' is missing",),
    ),
    (lambda folder: replaced(folder, {"a": "../outside.safetensors"}), ("shard '../outside.safetensors' is missing",)),
    (lambda folder: (folder / "config.json").unlink(), ("no config.json",)),
    (lambda folder: (folder / "config.json").write_bytes(b"{"), ("config.json", "not valid JSON")),
    (lambda folder: (folder / "config.json").write_bytes(b"[]"), ("config.json", "not a JSON object")),
    (lambda folder: (folder / "config.json").write_bytes(b"\xff"), ("config.json", "not valid")),
    (
        lambda folder: (folder / "config.json").write_text(
            '{"architectures": ["LlamaForCausalLM"], "hidden_size": 32}'
        ),
        ("not a DFlash drafter", "zlab", "speculators", "modelopt"),
    ),
]


@pytest.mark.parametrize(("damage", "words"), BAD_FILES, ids=[str(words) for _, words in BAD_FILES])
def test_a_file_that_is_damaged_or_dangerous_is_named(
    damage: Callable[[Path], object], words: tuple[str, ...], folder: Path
) -> None:
    damage(folder)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("name", "words"), [("nothing", "no such folder"), ("config.json", r"config\.json: not a folder")]
)
def test_no_folder_is_an_error(name: str, words: str, folder: Path) -> None:
    with pytest.raises(UserError, match=words):
        read_config(folder / name)


def test_an_id_is_fetched_at_its_revision_without_code_or_pickles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def fetch(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    load_drafter("z-lab/some-DFlash", revision="abc")
    patterns: dict[str, Any] = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": "*/*.safetensors"}
    assert asked == {"name": "z-lab/some-DFlash", "revision": "abc", **patterns}
    stored = ["config.json", "model-1.safetensors", "original/model.safetensors"]
    assert [*filter_repo_objects(stored, **patterns)] == stored[:2], "gpt-oss has its weights twice"


def test_a_local_folder_never_touches_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    load_drafter(folder)


BAD_CONFIGS: list[tuple[str, Mapping[str, object], str]] = [
    ("zlab", {"dflash_config.target_layer_ids": None, "num_target_layers": 36}, "no dflash_config.target_layer"),
    ("zlab", {"dflash_config": {"mask_token_id": 7}, "num_target_layers": 36}, "a formula that gives [1, 33]"),
    ("deepspec", {"target_layer_ids": None}, "target_layer_ids; add the target layers it was trained with"),
    ("zlab", {"dflash_config.target_layer_ids": [1, 3, 8]}, "name layer 8, but the target has layers 0..7"),
    ("speculators", {"aux_hidden_state_layer_ids": [2, 4, 9]}, "name layer 8, but the target has layers 0..7"),
    ("speculators", {"aux_hidden_state_layer_ids": [0, 4, 6]}, "aux_hidden_state_layer_ids is [0, 4, 6]"),
    ("zlab", {"dflash_config.target_layer_ids": [-1]}, "dflash_config.target_layer_ids is [-1]"),
    ("zlab", {"dflash_config.mask_token_id": 96}, "mask_token_id 96 is outside the vocabulary of 96"),
    ("zlab", {"dflash_config.mask_token_id": None}, "no dflash_config.mask_token_id"),
    ("zlab", {"block_size": 1}, "block_size is 1, not a whole number from 2 on"),
    ("zlab", {"block_size": None}, "no dflash_config.block_size"),
    ("zlab", {"dflash_config.block_size": 8}, "dflash_config.block_size is 8 but block_size is 4"),
    ("zlab", {"block_size": "16"}, "block_size is '16'"),
    ("zlab", {"hidden_size": True}, "hidden_size is True"),
    ("zlab", {"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple"),
    ("zlab", {"num_hidden_layers": 3}, "layer_types names 2 layers but num_hidden_layers is 3"),
    ("zlab", {"num_hidden_layers": 10**12}, "more than any drafter has"),
    ("zlab", {"layer_types": ["full_attention", "linear_attention"]}, "layer type 'linear_attention'"),
    ("zlab", {"dflash_config.new_thing": 3}, "unknown key dflash_config.new_thing = 3"),
    ("zlab", {"sample_from_anchors": True}, "did you mean sample_from_anchor?"),
    ("deepspec", {"new_thing": 3}, "unknown key new_thing = 3"),
    ("zlab", {"num_expert": 8}, "unknown key num_expert = 8"),
    ("zlab", {"block_size": 512}, "block_size 512 is more than max_position_embeddings 256"),
    ("zlab", {"block_size": 2_000_000_000}, "block_size: Input should be less than or equal to 1024"),
    ("zlab", {"vocab_size": 2**63}, "vocab_size: Input should be less than 2147483648"),
    ("zlab", {"max_position_embeddings": 2**40}, "max_position_embeddings: Input should be less than 2147483648"),
    ("zlab", {"rms_norm_eps": 2e9}, "rms_norm_eps: Input should be less than 1"),
    ("speculators", {"transformer_layer_config.rms_norm_eps": 2e9}, "rms_norm_eps: Input should be less than 1"),
    ("modelopt", {"new_thing": 3}, "unknown key new_thing = 3"),
    ("speculators", {"transformer_layer_config.new_thing": 3}, "unknown key transformer_layer_config.new_thing"),
    ("zlab", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "new_thing": 3}}, "rope_parameters.new"),
    ("zlab", {"query_zero_predicts_next": True}, "is True but sample_from_anchor is False"),
    ("zlab", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "no RoPE of this layer type"),
    ("speculators", {"new_thing": 3}, "unknown key new_thing = 3"),
    ("speculators", {"draft_vocab_size": 64}, "tensor d2t [64] is missing"),
    ("speculators", {"sample_from_anchor": True, "shift_label": False}, "sample_from_anchor is True but shift_label"),
    ("speculators", {"target_hidden_size": 64}, "target_hidden_size = 64"),
    ("speculators", {"speculators_config.proposal_methods": [{"speculative_tokens": 4}]}, "has 3 slots to draft"),
    ("speculators", {"speculators_model_type": "eagle3"}, "only DFlash speculators"),
    ("zlab", {"dflash_config.shift_label": 1}, "dflash_config.shift_label is 1, not true or false"),
    ("modelopt", {"is_causal": True}, "dflash_config.causal is False but is_causal is True"),
    ("modelopt", {"dflash_config.use_swa": True}, "no dflash_config.sliding_window"),
    (
        "modelopt",
        {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 9, "sliding_window": 8},
        "dflash_config.swa_window_size is 9 but sliding_window is 8",
    ),
    ("zlab", {"dflash_config.attention_sink_bias": True}, "attention_sink_bias [4] is missing"),
    (
        "zlab",
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "quantised with 'bitsandbytes' (config.json's quantization_config)",
    ),
    ("zlab", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ("zlab", {"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' without rope_scaling.factor"),
    ("zlab", {"rope_theta": None}, "no rope_theta"),
    ("zlab", {"rope_theta": float("nan")}, "rope_theta is nan, not a number"),
    ("zlab", {"rope_theta": -1.0}, "rope_theta is -1.0, not a positive number"),
    ("zlab", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, not a number"),
    ("zlab", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, not a positive number"),
    ("zlab", {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}, "partial rotary"),
    ("zlab", {"rope_scaling": {"type": "default", "rope_dim": 8}}, "rope_scaling.rope_dim = 8: partial rotary"),
    ("zlab", {"is_neox_style": False, "rope_is_neox_style": True}, "is True but is_neox_style is False"),
    ("speculators", {"transformer_layer_config.is_neox_style": "gptj"}, "is_neox_style is 'gptj', not true or false"),
    ("zlab", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta is 500000.0 but rope_theta is"),
    ("zlab", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("zlab", {"has_embed_tokens": True}, "an embedding of its own"),
    ("zlab", {"dflash_config": 3}, "dflash_config is 3, not an object"),
    ("zlab", {"architectures": ["DFlash2DraftModel"]}, "a DFlash2 drafter without conv_group_size, conv_kernel_size"),
    ("zlab", {"architectures": ["MiniMaxDFlash2DraftModel"]}, "a DFlash2 drafter without"),
    ("zlab", {"architectures": ["KimiK3DSparkModel"]}, "latent attention (MLA)"),
    ("zlab", {"dspark_block_size": 5}, "part of its target's checkpoint"),
    ("zlab", {"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna head"),
    ("zlab", {"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr head"),
    ("zlab", {"architectures": ["DFlashSomethingElse"]}, "architecture 'DFlashSomethingElse' is not supported"),
    ("zlab", {"dflash_config.projector_type": "domino"}, "Domino head, which is not supported yet"),
    ("zlab", {"dflash_config.markov_rank": 256}, "markov_rank is 256, but there is no markov_head_type"),
    ("speculators", {"speculators_model_type": "peagle"}, "only DFlash speculators"),
    ("speculators", {"projector_type": "domino"}, "Domino head"),
]  # fmt: skip
"""Dialect, changes of a plain drafter's config.json -> words of the error."""
BAD_HEADS: list[tuple[str, Mapping[str, object], Mapping[str, object], str]] = [
    ("zlab", {"layers": (SLIDING, FULL)}, {"use_sliding_window": False}, "layers but use_sliding_window is false"),
    ("deepspec", CONFIDENT, {"markov_head_type": None}, "markov_rank is 6, but there is no markov_head_type"),
    ("deepspec", CONFIDENT, {"markov_head_type": "lstm"}, "markov_head_type is 'lstm', which is not supported"),
    ("deepspec", CONFIDENT, {"markov_rank": -1}, "markov_rank is -1, not a whole number from 0 on"),
    ("deepspec", CONFIDENT, {"markov_rank": 0}, "reads Markov embeddings, but there is no Markov head"),
    ("deepspec", CONFIDENT, {"confidence_head_with_markov": False}, "proj.weight has shape [1, 38]"),
    ("deepspec", CONFIDENT, {"use_confidence_head": False}, "enable_confidence_head is True but use_confidence_head"),
    ("deepspec", CONFIDENT, {"sample_from_anchor": "yes"}, "sample_from_anchor is 'yes', not true or false"),
    ("deepspec", CONFIDENT, {"target_layer_ids": [-1, 3, 5]}, "target_layer_ids is [-1, 3, 5]"),
    ("deepspec", CONFIDENT, {"architectures": ["Gemma4DSparkModel"]}, "'Gemma4DSparkModel' is not supported"),
    ("deepspec", CONFIDENT, {"block_size": 0}, "block_size is 0, not a whole number from 1 on"),
    ("specforge", CONFIDENT, {"dflash_config.attention_mode": "mla"}, "layers have latent attention (MLA)"),
    ("zlab", {}, {"dflash_config.attention_mode": "mla", "q_lora_rank": 8}, "layers have latent attention (MLA)"),
    ("zlab", {}, {"dflash_config.attention_mode": "linear"}, "attention_mode = 'linear': only grouped-query attention"),
    ("specforge", CONFIDENT, {"dflash_config.new_thing": 1}, "unknown key dflash_config.new_thing"),
    ("specforge", CONFIDENT, {"dspark_config.new_thing": 1}, "unknown key dspark_config.new_thing"),
    ("specforge", CONFIDENT, {"dspark_config.markov_rank": 8}, "dspark_config.markov_rank is 8 but dflash_config."),
    ("zlab", {}, {"dspark_config.markov_rank": 8}, "unknown key dspark_config"),
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
"""Faults of drafters with heads, in the form of the table above."""


@pytest.mark.parametrize(
    ("dialect", "heads", "change", "words"),
    [*((dialect, {}, change, words) for dialect, change, words in BAD_CONFIGS), *BAD_HEADS],
)
def test_a_config_we_cannot_honour_is_refused(
    dialect: str, heads: Mapping[str, object], change: Mapping[str, object], words: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "drafter", dialect, heads)
    edit_json(folder / "config.json", change)
    refused(folder, words)


def test_every_problem_is_found_and_loading_says_how_many_more(folder: Path) -> None:
    edit_weights(
        folder, {"x": torch.zeros(1), Q: torch.zeros(2, 2), "norm.weight": torch.full((32,), torch.nan)}, ("fc.weight",)
    )
    assert len(problems_of(folder)) == 4
    assert len(open_checkpoint(folder).problems) == 3
    with pytest.raises(UserError, match="and 2 more"):
        load_drafter(folder)


def test_every_config_problem_is_found_at_once(folder: Path) -> None:
    edit_json(folder / "config.json", {"hidden_size": 0, "rope_theta": None, "dflash_config.typo": 1})
    assert len(problems_of(folder)) == 3


@pytest.mark.parametrize("change", [{"": 1}, {"dflash_config.target_layer_ids": [10**30]}, {"vocab_size": 1e400}])
def test_odd_json_is_no_traceback(change: dict[str, object], folder: Path) -> None:
    edit_json(folder / "config.json", change)
    problems_of(folder)


def test_reading_a_config_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from dflash_serve.checkpoint.reader import open_checkpoint, read_config; "
        f"read_config({str(folder)!r}); open_checkpoint({str(folder)!r}); "
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


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


@pytest.mark.parametrize(
    ("tokens", "slots", "block"), [(3, "anchor-first", 4), (2, "fill-in", 3)], ids=["as many as rows", "one fewer"]
)
def test_a_speculators_dspark_without_the_key_is_read_by_what_it_says_it_drafts(
    tokens: int, slots: str, block: int, tmp_path: Path
) -> None:
    """speculators takes the missing key as true, vLLM as false."""

    folder = written(tmp_path / "drafter", "speculators", CONFIDENT)
    methods = {"speculators_config.proposal_methods": [{"speculative_tokens": tokens}]}
    edit_json(folder / "config.json", {"sample_from_anchor": None, **methods})
    config, _ = read_config(folder)
    assert (config.slots, config.block_size) == (slots, block)


def test_a_reduced_vocabulary_beside_z_labs_keys_brings_both_of_its_maps(tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "speculators", REDUCED)
    plain = written(tmp_path / "plain", "zlab", {})
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    refused(folder, "maps a reduced draft vocabulary", "add draft_vocab_size")
    edit_json(folder / "config.json", {"draft_vocab_size": 40})
    assert problems_of(folder) == []


def test_a_missing_switch_is_settled_by_the_tensors(tmp_path: Path) -> None:
    """SGLang takes a missing enable_confidence_head as on, speculators as off."""

    for name, expected in (("Markov and confidence", True), ("vanilla Markov", False)):
        folder = written(tmp_path / name, "deepspec", HEADS[name])
        edit_json(folder / "config.json", {"enable_confidence_head": None})
        checkpoint = open_checkpoint(folder)
        assert checkpoint.problems == []
        assert checkpoint.config is not None
        assert (checkpoint.config.confidence is not None) is expected


@pytest.mark.parametrize("markov", [VANILLA, GATED, RNN], ids=lambda one: str(one["kind"]))
def test_modelopts_names_for_dspark_are_known(markov: dict[str, object], tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "modelopt", {**CONFIDENT, "markov": markov})
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

"""Every bad drafter is refused before launch, in one line with the fault, its place and the remedy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.reader import open_checkpoint, read_config
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter
from tests.support.tiny import FULL, SLIDING, edit_json, problems_of, tiny_drafter_config, write_tiny_drafter

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


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_config(tmp_path / "nothing")


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(UserError, match=re.escape("config.json: not a folder")):
        read_config(folder / "config.json")


def test_an_id_that_cannot_be_fetched_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(UserError) as caught:
        read_config("z-lab/nothing")
    assert str(caught.value).startswith("z-lab/nothing: not a folder, and the hub does not give it (no route to host)")
    assert "\n" not in str(caught.value)


def test_an_id_is_fetched_at_its_revision_without_code_or_pickles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def fetch(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    load_drafter("z-lab/some-DFlash", revision="abc")
    assert asked == {"name": "z-lab/some-DFlash", "revision": "abc", "allow_patterns": ["*.json", "*.safetensors"]}


def test_a_local_folder_never_touches_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    load_drafter(folder)


@pytest.mark.parametrize(
    ("dialect", "change", "words"),
    [
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
        ("modelopt", {"new_thing": 3}, "unknown key new_thing = 3"),
        ("speculators", {"transformer_layer_config.new_thing": 3}, "unknown key transformer_layer_config.new_thing"),
        (
            "zlab",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "new_thing": 3}},
            "rope_parameters.new",
        ),
        (
            "zlab",
            {"query_zero_predicts_next": True},
            "is True but sample_from_anchor is False",
        ),
        ("zlab", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "no RoPE of this layer type"),
        ("speculators", {"new_thing": 3}, "unknown key new_thing = 3"),
        ("speculators", {"draft_vocab_size": 64}, "tensor d2t [64] is missing"),
        (
            "speculators",
            {"sample_from_anchor": True, "shift_label": False},
            "sample_from_anchor is True but shift_label",
        ),
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
        ("zlab", {"dflash_config.attention_sink_bias": True}, "attention sinks"),
        (
            "zlab",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantised with 'fp8' (config.json's quantization_config)",
        ),
        ("zlab", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ("zlab", {"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' without rope_scaling.factor"),
        ("zlab", {"rope_theta": None}, "no rope_theta"),
        ("zlab", {"partial_rotary_factor": 0.5}, "partial rotary"),
        ("zlab", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta is 500000.0 but rope_theta is"),
        ("zlab", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("zlab", {"has_embed_tokens": True}, "an embedding of its own"),
        ("zlab", {"dflash_config": 3}, "dflash_config is 3, not an object"),
        (
            "zlab",
            {"architectures": ["DFlash2DraftModel"]},
            "a DFlash2 drafter without conv_group_size, conv_kernel_size",
        ),
        ("zlab", {"architectures": ["MiniMaxDFlash2DraftModel"]}, "a DFlash2 drafter without"),
        ("zlab", {"architectures": ["Lfm2DSparkDraftModel"]}, "'Lfm2DSparkDraftModel' is not supported"),
        ("zlab", {"architectures": ["KimiK3DSparkModel"]}, "latent attention (MLA)"),
        ("zlab", {"dspark_block_size": 5}, "part of its target's checkpoint"),
        ("zlab", {"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna head"),
        ("zlab", {"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr head"),
        ("zlab", {"architectures": ["DFlashSomethingElse"]}, "architecture 'DFlashSomethingElse' is not supported"),
        ("zlab", {"dflash_config.projector_type": "domino"}, "Domino head, which is not supported yet"),
        ("zlab", {"dflash_config.markov_rank": 256}, "markov_rank is 256, but there is no markov_head_type"),
        ("speculators", {"speculators_model_type": "peagle"}, "only DFlash speculators"),
        ("speculators", {"projector_type": "domino"}, "Domino head"),
    ],
)
def test_a_config_we_cannot_honour_is_refused(
    dialect: str, change: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter", dialect=dialect)
    edit_json(folder / "config.json", change)
    refused(folder, words)


def test_windows_that_are_switched_off_and_used_are_a_contradiction(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config(layers=(SLIDING, FULL)))
    edit_json(folder / "config.json", {"use_sliding_window": False})
    refused(folder, "sliding_attention", "use_sliding_window is false")


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

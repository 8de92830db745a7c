"""The embedded engine reads all tensors of a target, or refuses the target in one line before it computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.models.loader import head_weight, load_target
from dflash_torch import backend
from tests.support.quantised_target import LAYOUTS, WEIGHTS, write_quantised_target
from tests.support.tiny import edit_json
from tests.support.tiny_target import write_tiny_target

Tensors = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


def changed(plain: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of a target with other tensors."""
    shutil.copytree(plain, folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


def checked(target: Path | str) -> list[str]:
    launch = backend.launch(Deployment.model_validate({"target": {"model": str(target)}}))
    return [str(problem) for problem in launch.problems]


def refused(target: Path) -> str:
    """The line that `check` and loading alike give."""
    (told,) = checked(target)
    with pytest.raises(UserError) as error:
        load_target(str(target))
    assert str(error.value) == told
    return told


@pytest.mark.parametrize("recipe", ["quantization_config", "compression_config", "hf_quant_config.json", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_target_is_refused_by_its_scheme(
    plain: Path, tmp_path: Path, layout: str, recipe: str | None
) -> None:
    said, _, scheme = LAYOUTS[layout]
    target = write_quantised_target(plain, tmp_path / "target", layout, recipe=recipe)
    told = refused(target)
    assert told.startswith(f"{target}: the target is quantised (")
    assert "use its unquantised checkpoint" in told
    if recipe is not None:
        assert f"({scheme}; its recipe says {said['quant_method']}" in told
    elif layout != "bitsandbytes":  # whose tensors alone do not tell the scheme
        assert f"({scheme}; tensor model.layers.0." in told


@pytest.mark.parametrize(("layout", "scheme"), [(layout, scheme) for layout, (_, _, scheme) in LAYOUTS.items()])
def test_a_quantised_hub_target_is_refused_before_its_weights_are_fetched(
    plain: Path, tmp_path: Path, layout: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_quantised_target(plain, tmp_path / "target", layout)
    (target / WEIGHTS).unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(target))
    (told,) = checked("someone/model")
    known = {"INT8": "compressed-tensors", "INT4": "compressed-tensors", "FP8 per tensor": "FP8"}
    assert f"the target is quantised ({known.get(scheme, scheme)};" in told


def test_a_quantised_head_is_not_taken_for_a_plain_one(plain: Path, tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    with pytest.raises(UserError, match=r"the target is quantised \(FP8; tensor lm_head\.weight is F8_E4M3"):
        head_weight(str(changed(plain, tmp_path / "target", quantise)))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.mtp.fc.weight"])
def test_a_tensor_that_would_not_be_read_is_refused(plain: Path, tmp_path: Path, name: str) -> None:
    told = refused(changed(plain, tmp_path / "target", lambda tensors: tensors.update({name: torch.ones(64)})))
    assert f"tensor {name} [64] is not part of" in told


@pytest.mark.parametrize("name", [UP, "lm_head.weight", "model.norm.weight", "model.layers.3.input_layernorm.weight"])
def test_a_missing_tensor_is_refused(plain: Path, tmp_path: Path, name: str) -> None:
    told = refused(changed(plain, tmp_path / "target", lambda tensors: tensors.pop(name)))
    assert f"tensor {name} " in told
    assert "is missing; use a complete checkpoint" in told


def test_a_tensor_of_another_shape_is_refused(plain: Path, tmp_path: Path) -> None:
    told = refused(changed(plain, tmp_path / "target", lambda tensors: tensors.update({UP: torch.ones(40, 32)})))
    assert f"tensor {UP} has shape [40, 32], config.json asks for [48, 32]" in told


def test_what_can_be_computed_again_may_be_left_over(plain: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    target = changed(plain, tmp_path / "target", add)
    edit_json(target / "config.json", {"tie_word_embeddings": True})
    assert checked(target) == []
    model = load_target(str(target))
    assert torch.equal(model.logits(model.norm.weight), model.embedding @ model.norm.weight)


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        (UP, float("nan"), torch.float32),
        ("model.embed_tokens.weight", float("inf"), torch.bfloat16),
        ("model.layers.0.self_attn.k_proj.weight", float("-inf"), torch.float16),
        (UP, float("-inf"), torch.bfloat16),
    ],
)
def test_a_value_that_is_not_finite_is_refused(
    plain: Path, tmp_path: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    def spoil(tensors: Tensors) -> None:
        for each, tensor in tensors.items():
            tensors[each] = tensor.to(dtype)
        tensors[name][3, 5] = value

    target = changed(plain, tmp_path / "target", spoil)
    count = load_file(target / WEIGHTS)[name].numel()
    with pytest.raises(UserError, match=rf"tensor {name} has 1 values that are NaN or infinite, of {count}"):
        load_target(str(target))


KEYS = {
    **{"hidden_act": "gelu", "rope_interleaved": True, "use_mrope": True, "use_gemma_norm": True},
    **{"attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256},
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.2, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    **{"logit_scale": 0.1, "scale_emb": 12, "clip_qkv": 8.0, "use_qk_norm": True, "attention_sinks": True},
    **{"partial_rotary_factor": 0.5, "num_local_experts": 8, "n_routed_experts": 8, "kv_lora_rank": 512},
    **{"layer_types": ["linear_attention"] * 4, "sliding_window": 16},
    **{"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "architectures": ["LlamaForSequenceClassification"]},
    **{"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "text_config": {"hidden_size": 1}},
    **{"eos_token_id": "2", "num_key_value_heads": "2", "rms_norm_eps": None},
}
"""Keys that other readers compute by, with a value that changes the result."""


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_changes_what_is_computed_is_refused(plain: Path, tmp_path: Path, key: str) -> None:
    folder = changed(plain, tmp_path / "target", lambda _: None)
    windows = {"use_sliding_window": True, "sliding_window": 16} if "sliding" in key else {}
    edit_json(folder / "config.json", {**windows, key: KEYS[key]})
    with pytest.raises(UserError, match="architecture|layer type|llama with sliding|rope|rotary|" + key) as error:
        load_target(str(folder))
    assert "\n" not in str(error.value)


OF_TRANSFORMERS_4 = {
    **{"is_decoder": False, "num_beams": 1, "top_p": 0.9, "bad_words_ids": None, "forced_eos_token_id": 2},
    **{"pruned_heads": {}, "return_dict_in_generate": False, "tf_legacy_loss": False, "attn_implementation": "sdpa"},
    **{"typical_p": 1.0, "max_length": 20, "num_labels": 2, "unsloth_version": "2026.9", "model_max_length": 4096},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_writes_is_read(tmp_path: Path, family: str) -> None:
    written = AutoConfig.for_model(family).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**OF_TRANSFORMERS_4, **written}))
    assert read_target_config(tmp_path).model_type == family


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out_means_what_transformers_takes_for_it(tmp_path: Path, family: str) -> None:
    written = AutoConfig.for_model(family, num_hidden_layers=4, hidden_size=256, num_attention_heads=4).to_dict()
    read = list[str]()
    for key in written.keys() - {"model_type"}:
        (tmp_path / "config.json").write_text(json.dumps({name: written[name] for name in written if name != key}))
        try:
            found = read_target_config(tmp_path)
        except UserError:
            continue
        read.append(key)
        wanted = AutoConfig.from_pretrained(tmp_path)
        kinds = getattr(
            wanted, "layer_types", ["sliding_attention" if wanted.to_dict().get("sliding_window") else ""] * 4
        )
        assert (found.num_key_value_heads, found.rms_norm_eps) == (wanted.num_key_value_heads, wanted.rms_norm_eps), key
        assert found.head_dim == (getattr(wanted, "head_dim", None) or 64), key
        assert found.rope.theta == wanted.rope_parameters["rope_theta"], key
        assert found.tie_word_embeddings == wanted.tie_word_embeddings, key
        assert [layer.window is not None for layer in found.layers] == [kind.startswith("sl") for kind in kinds], key
    assert {"tie_word_embeddings", "rope_parameters"} <= set(read)


def test_a_tied_head_that_differs_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "target", lambda _: None)
    edit_json(folder / "config.json", {"tie_word_embeddings": True})
    assert "lm_head.weight is not model.embed_tokens.weight, but tie_word_embeddings is true" in refused(folder)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        (2, [2, 243], "<|im_end|>", (2, 243)),
        ([2, 5], 7, "<|endoftext|>", (2, 5, 7, 0)),
        (None, None, {"content": "<|im_end|>"}, (2,)),
        (None, None, None, ()),
    ],
)
def test_an_answer_ends_where_any_of_three_files_says(
    plain: Path, tmp_path: Path, config: object, generation: object, tokenizer: object, ends: tuple[int, ...]
) -> None:
    folder = changed(plain, tmp_path / "target", lambda _: None)
    edit_json(folder / "config.json", {"eos_token_id": config})
    edit_json(folder / "generation_config.json", {"eos_token_id": generation})
    edit_json(folder / "tokenizer_config.json", {"eos_token": tokenizer})
    assert read_target_config(folder).eos_token_ids == ends

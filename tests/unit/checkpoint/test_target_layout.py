"""A target's layout from its config.json alone: heads, experts, number formats, and bytes within a few per cent."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from dflash_serve.checkpoint.catalogue import CataloguedDrafter
from dflash_serve.checkpoint.reader import parse
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, read_target_shape
from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.deployment.description import Model, Quantization
from dflash_serve.errors import Problem, UserError
from dflash_serve.training.other_target import read_sizes
from tests.support.paper_models import write_paper_target
from tests.support.tiny import edit_json
from tests.unit.checkpoint.published_heads import PUBLISHED_DRAFTERS, config_json
from tests.unit.tensorrt_llm.published_targets import TARGETS


def layout(folder: Path, config: object, quantization: Quantization = "none") -> TargetLayout:
    (folder / "config.json").write_text(json.dumps(config))
    return read_target_layout(folder, Model(model="some/target", quantization=quantization))


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("Qwen/Qwen3-8B", 16.4),
        ("meta-llama/Llama-3.1-8B-Instruct", 16.1),
        ("openai/gpt-oss-120b", 65.2),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 61.1),
        ("moonshotai/Kimi-K2.5", 595),
        ("smollm2", 0.269),
    ],
)
def test_published_sizes_are_met_within_five_per_cent(name: str, gigabytes: float, tmp_path: Path) -> None:
    assert layout(tmp_path, TARGETS[name]).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.05)


def test_asked_for_formats_shrink_it(tmp_path: Path) -> None:
    plain, fp8, nvfp4 = (layout(tmp_path, TARGETS["Qwen/Qwen3-8B"], q) for q in ("none", "fp8", "nvfp4"))
    assert plain.weight_bytes > fp8.weight_bytes > nvfp4.weight_bytes > plain.weight_bytes / 4


def test_a_latent_target_has_one_vector_a_token(tmp_path: Path) -> None:
    kimi = layout(tmp_path, TARGETS["moonshotai/Kimi-K2.5"])
    assert kimi.latent
    assert kimi.kv_bytes(2) == 61 * 576 * 2
    assert (kimi.experts, kimi.architecture) == (384, "KimiK25ForConditionalGeneration")
    assert kimi.shape.name == "some/target"


HYBRID = {"num_hidden_layers": 4, "layer_types": None, "sliding_window": 100}
KV_LAYERS = {
    "listed": ({"layer_types": ["linear_attention", "full_attention", "conv", "full_attention"]}, (None, None)),
    "windows": ({"layer_types": ["sliding_attention", "full_attention"] * 2}, (100, None, 100, None)),
    "chunks": ({"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 64}, (64,) * 4),
    "Nemotron-H": ({"hybrid_override_pattern": "M-*M"}, (None,)),
    "Qwen3-Next": ({"full_attention_interval": 4}, (None,)),
    "Jamba": ({"attn_layer_period": 4, "attn_layer_offset": 2}, (None,)),
    "Bamba": ({"attn_layer_indices": [1]}, (None,)),
    "Kimi-Linear": ({"linear_attn_config": {"full_attn_layers": [4]}}, (None,)),
    "MiniMax": ({"attn_type_list": [0, 0, 1, 0]}, (None,)),
    "Gemma 3": ({"sliding_window_pattern": 2}, (100, None, 100, None)),
    "Gemma 3 without its pattern": ({"model_type": "gemma3_text", "num_hidden_layers": 7}, (*(5 * (100,)), None, 100)),
    "Llama 4": ({"model_type": "llama4_text", "attention_chunk_size": 64}, (64, 64, 64, None)),
    "MiMo-V2": ({"hybrid_layer_pattern": [0, 1, 1, 0]}, (None, 100, 100, None)),
    "shared": ({"num_kv_shared_layers": 2}, (None, None)),
    "Mistral": ({"model_type": "mistral"}, (100,) * 4),
    "Qwen2 with its switch off": ({"use_sliding_window": False}, (None,) * 4),
}
"""Keys of config.json -> the windows of the layers that have keys and values."""


@pytest.mark.parametrize(("keys", "windows"), KV_LAYERS.values(), ids=KV_LAYERS)
def test_only_layers_with_keys_and_values_are_counted(
    keys: dict[str, object], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    found = layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **HYBRID, **keys})
    assert tuple(layer.window for layer in found.kv_layers) == windows
    one = 2 * found.kv_heads * found.head_dim * 2
    assert found.kv_bytes(2, 1000) == one * sum(window or 1000 for window in windows)


GDN = {"linear_num_value_heads": 48, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
STATES = {
    "Qwen3.5": ({"full_attention_interval": 4, **GDN}, 3 * 48 * 128 * 128 * 4),
    "in bfloat16": ({"full_attention_interval": 4, **GDN, "mamba_ssm_dtype": "bfloat16"}, 3 * 48 * 128 * 128 * 2),
    "Nemotron-H, whose MLPs are layers": (
        {"hybrid_override_pattern": "M-*M", "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128},
        2 * 8 * 64 * 128 * 4,
    ),
    "Jamba": ({"attn_layer_period": 4, "mamba_expand": 2, "mamba_d_state": 16}, 3 * 2 * 4096 * 16 * 4),
    "Kimi-Linear": (
        {"linear_attn_config": {"full_attn_layers": [4], "num_heads": 32, "head_dim": 128}},
        3 * 32 * 128 * 128 * 4,
    ),
    "MiniMax": ({"attn_type_list": [0, 0, 1, 0]}, 3 * 32 * 128 * 128 * 4),
    "short convolutions": ({"layer_types": ["conv"] * 3 + ["full_attention"]}, 0),
    "none": ({}, 0),
}
"""Keys of config.json -> bytes of one sequence's recurrent state."""


@pytest.mark.parametrize(("keys", "size"), STATES.values(), ids=STATES)
def test_the_recurrent_state_of_hybrid_targets_is_counted(keys: dict[str, object], size: int, tmp_path: Path) -> None:
    assert layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], "num_hidden_layers": 4, **keys}).state_bytes == size


GEMMA_4: dict[str, object] = {
    "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "head_dim": 256,
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "global_head_dim": 512,
    "sliding_window": 1024, "layer_types": 10 * [*(5 * ["sliding_attention"]), "full_attention"],
    "tie_word_embeddings": True,
}  # fmt: skip
"""Of gemma-4-31B."""


def test_layers_of_full_attention_may_have_heads_of_their_own(tmp_path: Path) -> None:
    assert layout(tmp_path, GEMMA_4).kv_bytes(2, 10_000) == 2 * 2 * (50 * 1024 * 16 * 256 + 10 * 10_000 * 4 * 512)


@pytest.mark.parametrize(
    ("spared", "gigabytes"),
    [
        (["model.layers.0.self_attn*", "lm_head"], 31.5),
        (["re:.*self_attn.*"], 31.5),
        (["model.layers.0.self_attn.kv_b_proj"], 31.5),
        (["model.layers.0.self_attn.indexer.k_norm", "lm_head"], 19),
    ],
)
def test_attention_that_a_recipe_spares_is_in_bf16(spared: list[str], gigabytes: float, tmp_path: Path) -> None:
    recipe = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": spared}
    found = layout(tmp_path, {**GEMMA_4, "quantization_config": recipe})
    assert found.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.05)


DEEPSEEK_V4: dict[str, object] = {
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
    "o_groups": 8, "sliding_window": 128, "compress_ratios": [0, 0, *(21 * [4, 128])], "index_head_dim": 128,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
"""DeepSeek-V4-Flash's config.json. The last ratio belongs to the layer that predicts a second token."""


def test_vectors_of_compressed_tokens_are_counted(tmp_path: Path) -> None:
    found = layout(tmp_path, DEEPSEEK_V4)
    assert found.latent
    assert found.quantized_kv
    window, of_four, of_many = 43 * 128 * 584, 21 * 2500 * (584 + 132), 20 * (10_000 / 128) * 584
    assert found.kv_bytes(1, 10_000) == window + of_four + of_many


def test_an_index_is_counted_in_the_layers_that_have_one(tmp_path: Path) -> None:
    keys = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    own = layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys})
    assert own.kv_bytes(2, 10) == 4 * 10 * (576 * 2 + 132)
    shared = layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys, "indexer_types": ["full", *(3 * ["shared"])]})
    assert shared.kv_bytes(2, 10) == 4 * 10 * 576 * 2 + 10 * 132


def test_layers_with_a_window_may_have_heads_of_their_own(tmp_path: Path) -> None:
    keys: dict[str, object] = {
        "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1], "num_key_value_heads": 4, "head_dim": 192,
        "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "sliding_window": 128,
    }  # fmt: skip
    found = layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys})
    assert found.kv_bytes(2, 10_000) == 2 * (10_000 * 4 * 320 + 2 * 128 * 8 * 320)


LISTED = {
    "nothing": ({"quant_algo": "MIXED_PRECISION"}, 29.1, False),
    "FP8 attention, NVFP4 MLPs and head": (
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4"},
                "model.layers.0.linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
                "lm_head": {"quant_algo": "W4A16_NVFP4"},
            },
        },
        21.9,
        True,
    ),
}
"""Recipe of a mixed checkpoint of Qwen3.6-27B -> gigabytes, and whether its head is quantised."""


@pytest.mark.parametrize(("recipe", "gigabytes", "head"), LISTED.values(), ids=LISTED)
def test_formats_of_a_mixed_checkpoint_are_read_by_module(
    recipe: dict[str, object], gigabytes: float, head: bool, tmp_path: Path
) -> None:
    keys = HYBRID_WEIGHTS["Qwen3.5-27B"][0]
    asked = {"quantization_config": {"quant_method": "modelopt", **recipe}}
    found = layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys, **asked})
    assert found.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert found.head_is_quantized == head


RECURRENT: dict[str, dict[str, object]] = {
    "Nemotron 3.5": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "Qwen3-Next": {"full_attention_interval": 4},
    "Bamba": {"attn_layer_indices": [1]},
    "MiniMax": {"attn_type_list": [0, 0, 1, 0]},
    "LFM2": {"layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("keys", RECURRENT.values(), ids=RECURRENT)
def test_a_target_is_recurrent_by_any_of_the_keys_that_tell_it(keys: dict[str, object], tmp_path: Path) -> None:
    assert layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], "num_hidden_layers": 4, **keys}).recurrent


def test_experts_as_layers_do_not_make_a_target_recurrent(tmp_path: Path) -> None:
    keys = {"num_hidden_layers": 2, "layers_block_type": ["attention", "moe"]}
    assert not layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys}).recurrent


def test_the_number_of_layers_may_be_that_of_their_list(tmp_path: Path) -> None:
    keys = {"num_hidden_layers": None, "layers_block_type": 54 * ["mamba", "moe"]}  # Nemotron 3 Ultra
    assert layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys}).shape.num_layers == 108


HYBRID_WEIGHTS: dict[str, tuple[dict[str, object], float, float]] = {
    "Qwen3.5-27B": (
        {
            "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
            "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "attn_output_gate": True,
            "full_attention_interval": 4, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        },
        53.8, 26.9,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        {
            "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
            "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
        63.2, 3.6,
    ),
    "Nemotron-3-Nano-30B-A3B in transformers 5": (
        {
            "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
            "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712,
            "layers_block_type": 23 * ["mamba", "moe"] + 6 * ["attention"],
        },
        63.2, 3.6,
    ),
    "Qwen3.5-122B-A10B, which has a shared expert": (
        {
            "vocab_size": 248320, "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 256, "attn_output_gate": True, "full_attention_interval": 4,
            "linear_num_value_heads": 64, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
        244.1, 9.75,
    ),
    "gemma-4-26B-A4B, which has an MLP beside its experts": (
        {**GEMMA_4, "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704,
         "num_experts": 128, "top_k_experts": 8, "enable_moe_block": True, "num_hidden_layers": 30,
         "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
         "layer_types": 5 * [*(5 * ["sliding_attention"]), "full_attention"]},
        50.5, 3.8,
    ),
    "DeepSeek-V4-Flash, 284 billion, experts in MXFP4": (DEEPSEEK_V4, 155, 13.2),
    "Llama-4-Maverick, 400 billion": (
        {
            "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        801, 17.2,
    ),
    "MiMo-V2-Flash, 309 billion in FP8": (
        {
            "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "moe_intermediate_size": 2048,
            "moe_layer_freq": [0, *(47 * [1])], "n_routed_experts": 256, "num_experts_per_tok": 8,
            "quantization_config": {"quant_method": "fp8"},
        },
        310, 15.9,
    ),
    "Kimi-K3, 2.8 trillion, experts in MXFP4": (
        {
            "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93,
            "num_attention_heads": 96, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "moe_intermediate_size": 3072,
            "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "routed_expert_hidden_size": 3584,
            "linear_attn_config": {
                "full_attn_layers": [*range(4, 93, 4), 93], "num_heads": 96, "head_dim": 128, "use_full_rank_gate": True
            },
            "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        },
        1526, 97.7,
    ),
}  # fmt: skip
"""Published sizes -> gigabytes of weights, and billions of parameters that one token meets."""


@pytest.mark.parametrize("name", HYBRID_WEIGHTS)
def test_weights_of_hybrid_targets_are_counted_by_kind_of_layer(name: str, tmp_path: Path) -> None:
    keys, gigabytes, billions = HYBRID_WEIGHTS[name]
    found = layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys})
    assert found.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert found.active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e7, "rope_parameters": {"rope_type": "default"}}, (1e7, None)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "rope_theta": 1e7}}, (1e7, "yarn")),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1}, "full_attention": {"rope_theta": 2}}}, (2, None)),
    ],
)
def test_rope_is_read_wherever_engines_read_it(
    keys: dict[str, object], expected: tuple[object, ...], tmp_path: Path
) -> None:
    shape = layout(tmp_path, {**TARGETS["Qwen/Qwen3-8B"], **keys}).shape
    assert (shape.rope_theta, shape.rope_scaling) == expected


@pytest.mark.parametrize(
    ("recipe", "native"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_a_checkpoints_own_format_is_known_by_name(recipe: dict[str, str], native: str, tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target", recipe=recipe)
    assert read_target_layout(target, Model(model="t")).native_quantization == native


def test_modelopts_file_beside_config_json_is_read_too(tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target")
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (target / "hf_quant_config.json").write_text(json.dumps(beside))
    found = read_target_layout(target, Model(model="t"))
    assert (found.native_quantization, found.head_is_quantized) == ("nvfp4", False)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_one_line(name: str, tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target")
    for text, words in (("{", "not valid JSON"), ("[]", "not a JSON object")):
        (target / name).write_text(text)
        with pytest.raises(UserError, match=words) as error:
            read_target_layout(target, Model(model="t"))
        assert name in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", [["llama"], {"llama": 1}, 3, None])
def test_a_model_type_that_is_no_name_is_one_line(family: object, tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target")
    edit_json(target / "config.json", {"model_type": family})
    with pytest.raises(UserError, match="is not one the embedded backend runs"):
        read_target_config(target)


READERS: dict[str, Callable[[Path], object]] = {
    "shape": read_target_shape,
    "layout": lambda folder: read_target_layout(folder, Model(model="t")),
    "configuration": read_target_config,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_every_reader_of_a_target_makes_the_same_complaints(reader: Callable[[Path], object], tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target")
    edit_json(target / "config.json", {"hidden_size": None})
    with pytest.raises(UserError, match="hidden_size is None, not a positive whole number"):
        reader(target)
    for text, words in (("{", "not valid JSON"), ("[]", "not a JSON object")):
        (target / "config.json").write_text(text)
        with pytest.raises(UserError, match=f"{words}.*; download the target again"):
            reader(target)
    (target / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json; give a target's folder"):
        reader(target)


@pytest.mark.parametrize("drafter", PUBLISHED_DRAFTERS, ids=lambda drafter: drafter.repository)
def test_a_drafter_in_the_place_of_its_target_is_told_apart(drafter: CataloguedDrafter, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a DFlash drafter, not a target: are target and drafter swapped\?") as caught:
        layout(tmp_path, config_json(drafter))
    assert str(caught.value).startswith(str(tmp_path))


LARGE = 1 << 24
MOST_MEMORY = 1 << 26
"""Bytes. A list of `LARGE` numbers takes twice as many; reading a file takes a quarter."""


def integers(config: Mapping[str, object], *place: str) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from integers(value, *place, key)
        elif type(value) is int:
            yield *place, key


def peak(read: Callable[[], object]) -> tuple[int, str]:
    """The most bytes that reading took, and the error."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1], ""
    except UserError as error:
        return tracemalloc.get_traced_memory()[1], str(error)
    finally:
        tracemalloc.stop()


def absurd(config: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """A config.json with one of its whole numbers much too large, and that number's key."""
    for place in integers(config):
        copy = json.loads(json.dumps(config))
        reduce(getitem, place[:-1], copy)[place[-1]] = LARGE
        yield place[-1], copy


@pytest.mark.parametrize("name", TARGETS)
def test_no_number_of_a_targets_config_takes_much_memory(name: str, tmp_path: Path) -> None:
    config = {**TARGETS[name], "layer_types": None}  # then the number of layers makes the list
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_target_layout(tmp_path, Model(model="x")),
        lambda: read_target_config(tmp_path),
        lambda: read_sizes(tmp_path),
    )
    for key, changed in absurd(config):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        for read in readers:
            used, error = peak(read)
            assert used < MOST_MEMORY, (key, error)
            if key == "num_hidden_layers" and read is readers[0]:
                assert f"{key} is {LARGE}, more than the 1024 that a model may have; correct it" in error


def test_no_number_of_a_drafters_config_takes_much_memory() -> None:
    """One drafter of each dialect."""
    whole: dict[str, dict[str, object]] = {}
    for drafter in PUBLISHED_DRAFTERS:
        config, dialect = parse(config_json(drafter), Path("config.json"), [])
        if config is not None and dialect is not None:
            whole[dialect.name] = config_json(drafter)
    assert len(whole) >= 4
    for raw in whole.values():
        for key, changed in absurd(raw):
            problems: list[Problem] = []
            used, _ = peak(lambda raw=changed, problems=problems: parse(raw, Path("config.json"), problems))  # type: ignore[misc]
            assert used < MOST_MEMORY, key
            if key in ("num_hidden_layers", "block_size"):
                assert any(key in problem.what for problem in problems)

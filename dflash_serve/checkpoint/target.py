"""A target by its config.json alone: the sizes that its drafter depends on, and its layout on an engine's devices.

No weights are read, so a hub model's configuration is all that is fetched. The layout is a sum over the layers. A type
of layer (`ModelKeys.layer_kinds`) tells what a layer keeps of a sequence: keys and values, a window of them, latent
vectors, or a recurrent state. It also tells the layer's matrices: attention or a recurrence, a dense MLP, experts, or
both. A matrix is a product of sizes, and the quantisation recipe tells the bits of its weights. The sums are within 5 %
of published models; norms, biases, convolutions and vision towers are left out. Comments name the families of a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from dflash_serve.checkpoint.files import QUANT_CONFIG
from dflash_serve.checkpoint.quantization import Bits
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.checkpoint.target_files import (
    GENERATION_CONFIG,
    LINEAR,
    MAMBA,
    WINDOWS,
    ModelKeys,
    TargetFiles,
    read_target,
)
from dflash_serve.deployment.description import Model

SPECIAL_TOKENS = ("eos_token_id", "bos_token_id")
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties of generation_config.json -> their neutral values."""
STATE, SMALL_STATE, NO_MIXER = "a state", "a small state", "no mixer"
WITHOUT_KV = {
    **dict.fromkeys((LINEAR, MAMBA, "recurrent"), STATE),
    "conv": SMALL_STATE,  # LFM2: 8 kB, which is not counted
    **dict.fromkeys(("mlp", "moe"), NO_MIXER),  # layers that are an MLP alone (Nemotron-H)
}
"""Begin of a layer's type -> what the layer has instead of keys and values."""
RECURRENT_KEYS = ("hybrid_override_pattern", "linear_attn_config", "linear_num_value_heads", "mamba_d_state", "ssm_cfg")
"""Keys of config.json that only models with recurrent layers have."""
STATES = (
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),  # Qwen3-Next, Qwen3.5
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),  # Nemotron-H
    ("mamba_expand", "hidden_size", "mamba_d_state"),  # Bamba, Granite, Falcon-H1, Jamba
)
"""Keys whose product is the number of values in one layer's recurrent state."""


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target that its drafter depends on."""

    name: str  # name of the target as the user gave it, for messages
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int | None
    rope_theta: float | None = None  # RoPE base, of full attention where layer types differ; None = not in config.json
    rope_scaling: str | None = None  # RoPE type of the same; None = plain
    special_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # key of config.json -> ids


def read_target_shape(folder_or_id: str | Path, revision: str | None = None) -> TargetShape:
    """A target's sizes from its config.json, the only file that is fetched for a hub id.

    Raises:
        UserError: no such target, or a config.json without these sizes.
    """
    return _shape(read_target(local_folder(folder_or_id, revision, files=["config.json"])), str(folder_or_id))


def read_target_format(folder_or_id: str | Path) -> str | None:
    """The format of a target's weights as its files declare it; None = unquantised.

    Raises:
        UserError: no such target.
    """
    return read_target(local_folder(folder_or_id, files=["config.json", QUANT_CONFIG])).recipe.format


def _shape(target: TargetFiles, name: str) -> TargetShape:
    model, rope = target.model, target.model.rope
    longest, kind = model.get("max_position_embeddings"), rope.get("rope_type", rope.get("type"))
    theta = rope["rope_theta"]
    ids = {key: _ids(model.fields.get(key, target.raw.get(key))) for key in SPECIAL_TOKENS}
    return TargetShape(
        name=name,
        model_type=str(target.raw.get("model_type", "unknown")),
        vocab_size=model.required("vocab_size"),
        hidden_size=model.required("hidden_size"),
        num_layers=_layers_listed(model) or model.depth or model.required("num_hidden_layers"),
        max_position_embeddings=longest if type(longest) is int else None,
        rope_theta=float(theta) if isinstance(theta, int | float) else None,
        rope_scaling=str(kind) if kind not in (None, "default", "mrope") else None,
        special_tokens={key: tokens for key, tokens in ids.items() if tokens},
    )


def _ids(given: object) -> tuple[int, ...]:
    return tuple(token for token in (given if isinstance(given, list) else [given]) if type(token) is int)


def _layers_listed(model: ModelKeys) -> int:
    # Nemotron 3 Ultra's config.json has the list of layers and not their number.
    listed = model.get("layers_block_type") if model.get("num_hidden_layers") is None else None
    return len(listed) if isinstance(listed, list) else 0


class CachedLayer(NamedTuple):
    """The cache of one layer for one sequence."""

    width: int  # numbers of an entry: keys and values of all heads, or a latent vector
    window: int | None = None  # tokens that it keeps; None = the whole sequence
    tokens: int = 1  # tokens that one entry stands for
    index_bytes: int = 0  # bytes of an entry that chooses which tokens are attended; it has a format of its own

    def entries(self, tokens: int) -> float:
        """Entries for a sequence of `tokens` tokens."""
        return min(self.window or tokens, tokens) / self.tokens

    def bytes(self, each: float, tokens: int) -> float:
        """Bytes for a sequence of `tokens` tokens, with `each` bytes for a number."""
        return self.entries(tokens) * (self.width * each + self.index_bytes)


@dataclass(frozen=True)
class TargetLayout:
    """Layout of a target on an engine's devices."""

    shape: TargetShape
    architecture: str  # the first of config.json's `architectures`
    attention_heads: int
    kv_heads: int
    head_dim: int
    latent: bool  # DeepSeek's attention: latent vectors that all heads share instead of keys and values per head
    experts: int  # 0 = dense
    experts_per_token: int  # experts that process one token
    expert_blocks: int  # blocks with an FP8 scale along the inner size of an expert; 0 = its scales are others
    expert_bytes: int  # bytes of the experts among `weight_bytes`
    active_parameters: int  # parameters that one token is multiplied with, the embedding counted
    native_quantization: str | None
    """Format of the checkpoint's weights: fp8, nvfp4, mxfp4, or the name of another method; None = unquantised."""
    head_is_quantized: bool  # lm_head is NVFP4 too
    weight_bytes: int  # bytes on all devices together, estimated from the sizes; accurate to a few per cent
    recurrent: bool  # some layers keep a state instead of keys and values (GDN, Mamba, short convolutions)
    penalises: bool  # generation_config.json penalises repetitions by default in every request (Qwen3-Coder)
    kv_layers: tuple[CachedLayer, ...]  # the layers with keys and values
    precision: str | None = None  # `native_quantization` in a deployment's words (`fp8-block`, `w4a16`)
    quantized_kv: bool = False  # the checkpoint requests quantised keys and values
    dtype: str | None = None  # number format of what is not quantised (`float16`); None = not in config.json
    state_bytes: int = 0  # one sequence's state in all recurrent layers; its convolutions are 2 % of it, and left out
    state_layers: int = 0  # layers that keep it

    def kv_bytes(self, bytes_each: float, tokens: int = 1) -> int:
        """Bytes of one sequence's keys and values, in all heads of the layers that have them, each up to its window."""
        return int(sum(layer.bytes(bytes_each, tokens) for layer in self.kv_layers))


def target_configuration(model: Model) -> Path:
    """The folder of the target's configuration, which is fetched for a hub id.

    Raises:
        UserError: no such target.
    """
    return local_folder(model.model, model.revision, files=["config.json", QUANT_CONFIG, GENERATION_CONFIG])


def read_target_layout(folder: Path, model: Model) -> TargetLayout:
    """The layout of the target in `folder`; `model` is the deployment's section, with the requested quantisation.

    Raises:
        UserError: no config.json, or one without a language model's sizes.
    """
    return target_layout(read_target(folder), model)


def target_layout(target: TargetFiles, model: Model) -> TargetLayout:
    """The layout of a target that was read; `model` is the deployment's section, with the requested quantisation.

    Raises:
        UserError: its config.json has no language model's sizes.
    """
    shape, keys, recipe = _shape(target, model.model), target.model, target.recipe
    named, compressed = target.raw.get("architectures"), isinstance(keys.get("compress_ratios"), list)
    heads, experts = keys.size("num_attention_heads", 1), keys.size_of("experts")
    blocks = keys.size("moe_intermediate_size") // recipe.block_rows if recipe.block_rows and experts else 0
    asked = "none" if model.quantization == recipe.precision else model.quantization
    weights = _weights(keys, recipe.bits(asked, keys.get("expert_dtype")))
    return TargetLayout(
        shape=shape,
        architecture=str(named[0]) if isinstance(named, list) and named else "unknown",
        attention_heads=heads,
        kv_heads=keys.size("num_key_value_heads", heads),
        head_dim=_head_dim(keys),
        latent=bool(keys.size("kv_lora_rank") or compressed),
        experts=experts,
        experts_per_token=keys.size_of("experts per token"),
        expert_blocks=blocks,
        expert_bytes=weights.expert_bytes,
        active_parameters=weights.active_parameters,
        native_quantization=recipe.format,
        head_is_quantized=recipe.quantises_head,
        weight_bytes=weights.bytes,
        recurrent=_recurrent(keys),
        penalises=any(target.generation.get(key, neutral) not in (neutral, None) for key, neutral in PENALTIES.items()),
        kv_layers=tuple(_compressed_layers(keys) if compressed else _kv_layers(keys)),
        state_bytes=_state_bytes(keys),
        state_layers=_state_layers(keys),
        precision=recipe.precision,
        quantized_kv=compressed or recipe.quantises_kv,
        dtype=_dtype(keys.fields) or _dtype(target.raw),
    )


def _dtype(fields: Mapping[str, object]) -> str | None:
    named = fields.get("dtype") or fields.get("torch_dtype")
    return named if isinstance(named, str) and named != "auto" else None


def _head_dim(model: ModelKeys) -> int:
    return model.size("head_dim") or model.size("hidden_size") // model.size("num_attention_heads", 1)


# What a sequence leaves in each layer: keys and values, or a state.


def _without_kv(kind: str) -> str | None:
    return next((instead for begin, instead in WITHOUT_KV.items() if kind.startswith(begin)), None)


def _recurrent(model: ModelKeys) -> bool:
    instead = set(map(_without_kv, model.layer_kinds))
    return not instead.isdisjoint({STATE, SMALL_STATE}) or any(map(model.get, RECURRENT_KEYS))


def _kv_layers(model: ModelKeys) -> Iterator[CachedLayer]:
    kinds, size = model.layer_kinds, model.size
    kinds = kinds[: len(kinds) - size("num_kv_shared_layers")]  # Gemma's last layers read earlier ones' K/V
    heads, dim = size("num_key_value_heads", size("num_attention_heads", 1)), _head_dim(model)
    plain = heads * (dim + size("v_head_dim", dim))  # MiMo-V2's values are narrower than its keys
    full = 2 * size("num_global_key_value_heads") * size("global_head_dim")  # Gemma 4
    narrow = size("swa_head_dim", dim)
    sliding = size("swa_num_key_value_heads") * (narrow + size("swa_v_head_dim", narrow))  # MiMo-V2
    rank, indexers = size("kv_lora_rank"), model.get("indexer_types")
    for layer, kind in enumerate(kinds):
        if _without_kv(kind):
            continue
        if rank:  # `indexer_types`: GLM-5.2's "shared" layers have no index of their own
            shares = isinstance(indexers, list) and indexers[layer : layer + 1] == ["shared"]
            yield CachedLayer(rank + size("qk_rope_head_dim"), index_bytes=0 if shares else _index_bytes(model))
        elif kind in WINDOWS:
            yield CachedLayer(sliding or plain, size(WINDOWS[kind]) or None)
        else:
            yield CachedLayer(full or plain)


def _index_bytes(model: ModelKeys) -> int:
    # FP8, and a float32 scale for 128 numbers (SGLang `mem_cache/deepseek_v4_memory_pool.py`).
    numbers = model.size("index_head_dim")
    return numbers + numbers // 128 * 4


def _compressed_layers(model: ModelKeys) -> Iterator[CachedLayer]:
    # DeepSeek-V4: the latent vectors of a window in each layer, and those of 4 or of 128 tokens together in most of
    # them. A vector is FP8 but for its rotary part, and has 8 bytes of scales. An index chooses those of 4 tokens.
    width, ratios = _head_dim(model) + model.size("qk_rope_head_dim") + 8, model.get("compress_ratios")
    for ratio in ratios[: model.depth] if isinstance(ratios, list) else []:
        yield CachedLayer(width, model.size("sliding_window", 128))
        if isinstance(ratio, int) and ratio > 0:
            yield CachedLayer(width, tokens=ratio, index_bytes=_index_bytes(model) if ratio == 4 else 0)


def _state_bytes(model: ModelKeys) -> int:
    # Engines keep it in float32 unless `mamba_ssm_dtype` says otherwise (SGLang `configs/mamba_utils.py`).
    numbers = [prod(map(model.size, keys)) for keys in STATES]
    if linear := model.part("linear_attn_config"):  # Kimi-Linear
        numbers.append(linear.size("num_heads") * linear.size("head_dim") ** 2)
    if isinstance(model.get("attn_type_list"), list):  # MiniMax
        numbers.append(model.size("num_attention_heads") * _head_dim(model) ** 2)
    each = 2 if model.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4
    return max(numbers) * each * _state_layers(model)


def _state_layers(model: ModelKeys) -> int:
    return sum(_without_kv(kind) == STATE for kind in model.layer_kinds)


# Weights.


class Weights(NamedTuple):
    """Sums over all layers, embedding and head."""

    bytes: int
    expert_bytes: int  # of routed experts, among them
    active_parameters: int  # that one token is multiplied with


class Mlps(NamedTuple):
    """The MLPs of all layers."""

    matrices: int  # of one MLP
    dense: int  # layers with a dense one
    sparse: int  # layers with experts


def _weights(model: ModelKeys, bits: Bits) -> Weights:
    size, hidden, kinds, mlps = model.size, model.size("hidden_size"), model.layer_kinds, _mlps(model)
    ends = size("vocab_size") * hidden * (1 if model.get("tie_word_embeddings") else 2)
    width = size("moe_intermediate_size", size("intermediate_size"))
    expert = mlps.matrices * (model.size_of("input of experts") or hidden) * width * mlps.sparse
    # Llama 4 does not say that it has a shared expert. Qwen says the width of all its shared ones together.
    number = model.size_of("shared experts") or int(model.get("model_type") == "llama4_text")
    shared = number * size("moe_shared_expert_intermediate_size", width) or size("shared_expert_intermediate_size")
    dense = model.size_of("dense MLP") or size("intermediate_size")
    mlp = mlps.matrices * hidden * (dense * mlps.dense + shared * mlps.sparse)
    mixers = sum(_mixer(model, hidden, kind) for kind in kinds)
    routed, chosen = expert * model.size_of("experts"), expert * model.size_of("experts per token")
    total = mlp * bits.mlp + routed * bits.experts + mixers * bits.attention + ends * 16
    return Weights(int(total / 8), int(routed * bits.experts / 8), mlp + chosen + mixers + ends)


def _mlps(model: ModelKeys) -> Mlps:
    kinds = model.layer_kinds
    if {"mlp", "moe"} & set(kinds):  # Nemotron-H, whose MLPs are layers, of two matrices each
        return Mlps(2, kinds.count("mlp"), kinds.count("moe"))
    if model.get("enable_moe_block"):  # Gemma 4 has both in every layer
        return Mlps(3, len(kinds), len(kinds))
    if not model.size_of("experts"):
        return Mlps(3, len(kinds), 0)
    listed, step = model.get("moe_layer_freq"), model.size("interleave_moe_layer_step")
    if step:  # Llama 4
        sparse = len(kinds) // step
    elif isinstance(listed, list):
        sparse = sum(map(bool, listed))
    else:
        sparse = len(kinds) - model.size("first_k_dense_replace")
    return Mlps(3, len(kinds) - sparse, sparse)


def _mixer(model: ModelKeys, hidden: int, kind: str) -> int:
    # What is not the MLP in a layer: attention, or a recurrence of the sizes that are known, else taken to be as large.
    size = model.size
    if _without_kv(kind) == NO_MIXER:
        return 0
    heads, groups = size("linear_num_value_heads"), size("linear_num_key_heads")
    if kind == LINEAR and heads and groups:  # Qwen3-Next, Qwen3.5: q, k; v, its gate and the output
        keys, values = groups * size("linear_key_head_dim"), heads * size("linear_value_head_dim")
        return hidden * (2 * keys + 3 * values)
    linear = model.part("linear_attn_config")
    if kind == LINEAR and linear:  # Kimi-Linear: q, k, v and the output, and K3's gate
        matrices = 5 if linear.get("use_full_rank_gate") else 4
        return matrices * hidden * linear.size("num_heads") * linear.size("head_dim")
    if kind == MAMBA and (values := size("mamba_num_heads") * size("mamba_head_dim")):
        return hidden * (3 * values + 2 * size("n_groups") * size("ssm_state_size"))
    return _attention(model, hidden)


def _attention(model: ModelKeys, hidden: int) -> int:
    # Grouped queries, or DeepSeek's latent form (Kimi).
    size, heads, dim = model.size, model.size("num_attention_heads", 1), _head_dim(model)
    query, rank, output = size("q_lora_rank"), size("kv_lora_rank"), size("o_lora_rank")
    if output:  # DeepSeek-V4: one latent vector is keys and values; the output goes through groups of heads
        return hidden * (query + dim + size("o_groups") * output) + heads * dim * (query + output)
    if rank:
        rope, nope, value = size("qk_rope_head_dim"), size("qk_nope_head_dim"), size("v_head_dim")
        down, up = hidden * (query + rank + rope), heads * (query * (nope + rope) + rank * (nope + value))
        return down + up + heads * value * hidden
    gate = heads if model.get("attn_output_gate") else 0
    return hidden * dim * (2 * (heads + size("num_key_value_heads", heads)) + gate)

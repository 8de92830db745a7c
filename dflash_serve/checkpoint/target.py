"""A target as its files describe it: sizes, layout on devices, quantisation.

`TargetShape` is what a drafter depends on, `TargetLayout` what engines and the planner need (heads, experts, formats,
bytes): only the configuration of a hub model is fetched for them. Both are read from JSON without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from dflash_serve.checkpoint.config import FULL, SLIDING
from dflash_serve.checkpoint.files import IN_CONFIG, QUANT_CONFIG, load_object
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.deployment.description import Model, Quantization
from dflash_serve.errors import UserError

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal models have the sizes of their language model."""
BITS: Mapping[str, float] = {"none": 16, "fp8": 8, "nvfp4": 4.5, "mxfp4": 4.25}
"""Bits per weight with its scales: NVFP4 has 8 bits for 16 values, MXFP4 8 for 32."""
OTHER_BITS = 4.5  # bits per weight of any other method: INT4 with scales (compressed-tensors, AWQ, GPTQ)
FORMATS = {"nvfp4": ("nvfp4", "fp4_pack"), "mxfp4": ("mxfp4",), "fp8": ("fp8", "float-quantized")}
"""Format -> words in a checkpoint's quantisation recipe that identify it."""
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k_experts", "num_experts_per_token")
MLPS = ("mlp", "moe")  # prefixes of layers that are an MLP alone (Nemotron-H)
RECURRENT_LAYERS = ("linear_attention", "mamba", "conv", "recurrent", *MLPS)
"""Prefixes of names in `layer_types` for layers without keys and values."""
WINDOWS = {SLIDING: "sliding_window", "chunked_attention": "attention_chunk_size"}  # Layer type -> key of its window
KINDS = ("layer_types", "layers_block_type", "attn_type_list")
FULL_LAYERS = ("attn_layer_indices", "full_attn_idxs")
"""Keys with the type of every layer, and with the indices of those of full attention."""
SLIDERS = ("mistral", "mixtral")
SPECIAL_TOKENS = ("eos_token_id", "bos_token_id")
EXPERT_WIDTHS = ("moe_latent_size", "routed_expert_hidden_size")
"""Keys with the input size of routed experts that are narrower than the model: Nemotron 3, Kimi-K3."""
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
DENSE_WIDTHS = ("dense_intermediate_size", "intermediate_size_mlp")
"""Keys with the size of dense MLPs beside experts, where it is not `intermediate_size`: MiniMax-M3, Llama 4."""
RECURRENT_KEYS = ("hybrid_override_pattern", "linear_attn_config", "linear_num_value_heads", "mamba_d_state", "ssm_cfg")
"""Keys of config.json that only models with recurrent layers have."""
STATES = (
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),  # Qwen3-Next, Qwen3.5
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),  # Nemotron-H
    ("mamba_expand", "hidden_size", "mamba_d_state"),  # Bamba, Granite, Falcon-H1, Jamba
)
"""Keys whose product is the number of values in one layer's recurrent state."""
STATELESS = (*MLPS, "conv")  # prefixes of layer types without a state, or with a small one (LFM2: 8 kB)
ALTERNATION = {"gemma2": 2, "gemma3_text": 6, "llama4_text": 4}
"""Model type -> each how many layers one is of full attention, where config.json does not say it."""
QUANTISING_ATTENTION = ("fp8", "nvfp4")
ATTENTION_MODULE = r"(attn|mixer)\.\w*proj"
SPARED_ATTENTION = r"self_attn(\W*|\.kv_\w*proj\w*)$"  # modules of a quantisation recipe that keep attention in bf16
GENERATION_CONFIG = "generation_config.json"
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties of generation_config.json -> their neutral values."""


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
    folder = local_folder(folder_or_id, revision, files=["config.json"])
    return _shape(load_object(folder / "config.json", kind="target"), folder, str(folder_or_id))


def _shape(raw: Mapping[str, object], folder: Path, name: str) -> TargetShape:
    inner = language_model(raw)
    longest = inner.get("max_position_embeddings")
    return TargetShape(
        name=name,
        model_type=str(raw.get("model_type", "unknown")),
        vocab_size=required_size(inner, "vocab_size", folder),
        hidden_size=required_size(inner, "hidden_size", folder),
        num_layers=_layers_listed(inner) or required_size(inner, "num_hidden_layers", folder),
        max_position_embeddings=longest if type(longest) is int else None,
        **_rope(inner),
        special_tokens={key: ids for key in SPECIAL_TOKENS if (ids := _ids(inner.get(key, raw.get(key))))},
    )


def _ids(given: object) -> tuple[int, ...]:
    return tuple(token for token in (given if isinstance(given, list) else [given]) if type(token) is int)


def _rope(fields: Mapping[str, object]) -> dict[str, Any]:
    # In `rope_parameters`, flat or by layer type, in `rope_scaling`, or in keys of their own.
    inside = fields.get("rope_parameters") or fields.get("rope_scaling")
    rope = inside if isinstance(inside, dict) else {}
    if by_layer := [one for one in rope.values() if isinstance(one, dict)]:
        rope = rope.get("full_attention", by_layer[0])
    theta, kind = rope.get("rope_theta", fields.get("rope_theta")), rope.get("rope_type", rope.get("type"))
    return {
        "rope_theta": float(theta) if isinstance(theta, int | float) else None,
        "rope_scaling": str(kind) if kind not in (None, "default", "mrope") else None,
    }


def language_model(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config.json that has the language model's sizes."""
    return next((inner for inner in map(raw.get, TEXT_CONFIGS) if isinstance(inner, dict)), raw)


def required_size(fields: Mapping[str, object], key: str, folder: Path) -> int:
    """A positive whole number of the config.json in `folder`; engines count sizes in 32 bits.

    Raises:
        UserError: it is absent or something else.
    """
    value = fields.get(key)
    if type(value) is int and 0 < value < 2**31:
        return value
    where = str(folder / "config.json")
    raise UserError(f"{key} is {value!r}, not a positive whole number", where=where, do="give a language model")


def _size(fields: Mapping[str, object], key: str, default: int = 0) -> int:
    value = fields.get(key)
    return value if type(value) is int and value > 0 else default


def _first(fields: Mapping[str, object], keys: Sequence[str]) -> int:
    return next((size for key in keys if (size := _size(fields, key))), 0)


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
    quantized_kv: bool = False  # the checkpoint requests quantised keys and values
    dtype: str | None = None  # number format of what is not quantised (`float16`); None = not in config.json
    state_bytes: int = 0  # one sequence's state in all recurrent layers; its convolutions are 2 % of it, and left out

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
    """Reads `folder/config.json`; `model` is the deployment's section, with the requested quantisation.

    Raises:
        UserError: no config.json, or one without a language model's sizes.
    """
    raw = load_object(folder / "config.json", kind="target")
    named = raw.get("architectures")
    shape, inner = _shape(raw, folder, model.model), language_model(raw)
    recipe = read_recipe(raw, folder)
    heads, compressed = _size(inner, "num_attention_heads", 1), isinstance(inner.get("compress_ratios"), list)
    native = native_format(recipe)
    weight_bytes, expert_bytes, active_parameters = _weights(inner, *_bits(inner, recipe, model.quantization))
    return TargetLayout(
        shape=shape,
        architecture=str(named[0]) if isinstance(named, list) and named else "unknown",
        attention_heads=heads,
        kv_heads=_size(inner, "num_key_value_heads", heads),
        head_dim=_head_dim(inner),
        latent=bool(_size(inner, "kv_lora_rank") or compressed),
        experts=_first(inner, EXPERTS),
        experts_per_token=_first(inner, CHOSEN),
        expert_blocks=_expert_blocks(inner, recipe),
        expert_bytes=expert_bytes,
        active_parameters=active_parameters,
        native_quantization=native,
        head_is_quantized=(native == "nvfp4" and not _spares(recipe, "lm_head")) or "lm_head" in _listed(recipe),
        weight_bytes=weight_bytes,
        recurrent=_recurrent(inner),
        penalises=_penalises(folder),
        kv_layers=tuple(_compressed_layers(inner) if compressed else _kv_layers(inner)),
        state_bytes=_state_bytes(inner),
        quantized_kv=bool(compressed or recipe.get("kv_cache_quant_algo") or recipe.get("kv_cache_scheme")),
        dtype=_dtype(inner) or _dtype(raw),
    )


def read_recipe(raw: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The quantisation recipe in a target's config.json `raw`, or in ModelOpt's file beside it; {} = unquantised."""
    for holder in (raw, language_model(raw)):
        for key in (IN_CONFIG, "compression_config"):  # the second is what compressed-tensors wrote at first
            inside = holder.get(key)
            if isinstance(inside, dict):
                return inside
    beside = folder / QUANT_CONFIG
    recipe = load_object(beside, kind="target").get("quantization") if beside.is_file() else None
    return recipe if isinstance(recipe, dict) else {}


def _dtype(fields: Mapping[str, object]) -> str | None:
    named = fields.get("dtype") or fields.get("torch_dtype")
    return named if isinstance(named, str) and named != "auto" else None


def _penalises(folder: Path) -> bool:
    path = folder / GENERATION_CONFIG
    defaults = load_object(path, kind="target") if path.is_file() else {}
    return any(defaults.get(name, neutral) not in (neutral, None) for name, neutral in PENALTIES.items())


def recipe_words(recipe: Mapping[str, object]) -> list[str]:
    """A recipe's names of its method, algorithm and storage, in lower case."""
    return [str(recipe[key]).lower() for key in ("quant_method", "quant_algo", "format") if recipe.get(key)]


def native_format(recipe: Mapping[str, object]) -> str | None:
    """Format of a recipe: fp8, nvfp4, mxfp4, or the name of another method; None = unquantised."""
    words = recipe_words(recipe)
    for name, marks in FORMATS.items():
        if any(mark in word for word in words for mark in marks):
            return name
    return words[0] if words else None


def _spares(recipe: Mapping[str, object], pattern: str) -> bool:
    spared = [recipe.get(key) for key in ("exclude_modules", "ignore", "modules_to_not_convert")]
    return any(re.search(pattern, str(module)) for modules in spared if isinstance(modules, list) for module in modules)


def _listed(recipe: Mapping[str, object]) -> Mapping[str, str]:
    # Module -> its format, in a recipe of ModelOpt's MIXED_PRECISION.
    layers = recipe.get("quantized_layers")
    found = layers.items() if isinstance(layers, dict) else ()
    return {module: str(entry.get("quant_algo")).lower() for module, entry in found if isinstance(entry, dict)}


def _bits(inner: Mapping[str, object], recipe: Mapping[str, object], asked: Quantization) -> tuple[float, float, float]:
    """Bits of a weight of an MLP, of attention, and of routed experts."""
    # FP8 and NVFP4 checkpoints quantise attention too, but for those that list it; MXFP4 and INT4 ones keep it in bf16.
    native, spared = native_format(recipe), _spares(recipe, SPARED_ATTENTION)
    if asked != "none":
        return BITS[asked], 16 if spared or asked not in QUANTISING_ATTENTION else BITS[asked], BITS[asked]
    inside = BITS.get(native or "none", OTHER_BITS)
    listed = [algorithm for module, algorithm in _listed(recipe).items() if re.search(ATTENTION_MODULE, module)]
    attention = inside if native in QUANTISING_ATTENTION and not spared else 16
    if listed:
        attention = BITS["nvfp4" if "nvfp4" in listed[0] else "fp8"]
    of_experts = recipe.get("moe_quant_algo") or ("mxfp4" if inner.get("expert_dtype") == "fp4" else native)
    return inside, attention, BITS.get(str(of_experts).lower(), inside)


def _expert_blocks(inner: Mapping[str, object], recipe: Mapping[str, object]) -> int:
    shape = recipe.get("weight_block_size")
    size = shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else 0
    return _size(inner, "moe_intermediate_size") // size if size > 0 and _first(inner, EXPERTS) else 0


def _layers_listed(inner: Mapping[str, object]) -> int:
    # Nemotron 3 Ultra's config.json has the list of layers and not their number.
    listed = inner.get("layers_block_type") if inner.get("num_hidden_layers") is None else None
    return len(listed) if isinstance(listed, list) else 0


def layer_kinds(inner: Mapping[str, object]) -> list[str]:
    """Type of every layer in transformers' names, by the keys of all families that are known."""
    count, kind = _size(inner, "num_hidden_layers"), str(inner.get("model_type"))
    listed = next((given for key in KINDS if isinstance(given := inner.get(key), list)), None)
    if listed is not None:
        names = {"0": "linear_attention", "1": FULL, "attention": FULL}  # MiniMax's, and Granite's
        return [names.get(str(one), str(one)) for one in listed]
    pattern, linear = inner.get("hybrid_override_pattern"), inner.get("linear_attn_config")
    if isinstance(pattern, str):  # Nemotron-H
        return [{"*": FULL, "M": "mamba", "E": "moe"}.get(letter, "mlp") for letter in pattern]
    full = next((given for key in FULL_LAYERS if isinstance(given := inner.get(key), list)), None)
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):  # Kimi-Linear counts from 1
        full = [index - 1 for index in linear["full_attn_layers"] if isinstance(index, int)]
    if full is not None:
        return [FULL if index in full else "linear_attention" for index in range(count)]
    interval, period = _size(inner, "full_attention_interval"), _size(inner, "attn_layer_period")
    if interval or period:  # Qwen3-Next, and Jamba
        offset = _size(inner, "attn_layer_offset") if period else interval - 1
        return [FULL if i % (period or interval) == offset else "linear_attention" for i in range(count)]
    if isinstance(sliding := inner.get("hybrid_layer_pattern"), list):  # MiMo-V2
        return [SLIDING if one else FULL for one in sliding]
    pattern = _size(inner, "sliding_window_pattern", ALTERNATION.get(kind, 0))
    other = "chunked_attention" if kind == "llama4_text" else SLIDING
    if pattern > 1 and inner.get(WINDOWS[other]):  # Gemma 2 and 3, Llama 4
        return [FULL if i % pattern == pattern - 1 else other for i in range(count)]
    # Mistral slides everywhere, Qwen2 behind a switch and from `max_window_layers` on.
    slides = bool(inner.get("sliding_window", kind == "mistral")) and inner.get("use_sliding_window", kind in SLIDERS)
    most = inner.get("max_window_layers", 28)
    first = most if isinstance(most, int) and kind.startswith("qwen") else 0
    return [SLIDING if slides and index >= first else FULL for index in range(count)]


def _kv_layers(inner: Mapping[str, object]) -> Iterator[CachedLayer]:
    kinds = layer_kinds(inner)
    kinds = kinds[: len(kinds) - _size(inner, "num_kv_shared_layers")]  # Gemma's last layers read earlier ones' K/V
    heads, dim = _size(inner, "num_key_value_heads", _size(inner, "num_attention_heads", 1)), _head_dim(inner)
    plain = heads * (dim + _size(inner, "v_head_dim", dim))  # MiMo-V2's values are narrower than its keys
    full = 2 * _size(inner, "num_global_key_value_heads") * _size(inner, "global_head_dim")  # Gemma 4
    narrow, wide = _size(inner, "swa_head_dim", dim), _size(inner, "swa_v_head_dim", _size(inner, "swa_head_dim", dim))
    sliding = _size(inner, "swa_num_key_value_heads") * (narrow + wide)  # MiMo-V2
    rank, indexers = _size(inner, "kv_lora_rank"), inner.get("indexer_types")
    for layer, kind in enumerate(kinds):
        if kind.startswith(RECURRENT_LAYERS):
            continue
        if rank:  # `indexer_types`: GLM-5.2's "shared" layers have no index of their own
            shares = isinstance(indexers, list) and indexers[layer : layer + 1] == ["shared"]
            yield CachedLayer(rank + _size(inner, "qk_rope_head_dim"), index_bytes=0 if shares else _index_bytes(inner))
        elif kind in WINDOWS:
            yield CachedLayer(sliding or plain, _size(inner, WINDOWS[kind]) or None)
        else:
            yield CachedLayer(full or plain)


def _index_bytes(inner: Mapping[str, object]) -> int:
    # FP8, and a float32 scale for 128 numbers (SGLang `mem_cache/deepseek_v4_memory_pool.py`).
    numbers = _size(inner, "index_head_dim")
    return numbers + numbers // 128 * 4


def _compressed_layers(inner: Mapping[str, object]) -> Iterator[CachedLayer]:
    # DeepSeek-V4: the latent vectors of a window in each layer, and those of 4 or of 128 tokens together in most of
    # them. A vector is FP8 but for its rotary part, and has 8 bytes of scales. An index chooses those of 4 tokens.
    width, ratios = _head_dim(inner) + _size(inner, "qk_rope_head_dim") + 8, inner.get("compress_ratios")
    for ratio in ratios[: _size(inner, "num_hidden_layers")] if isinstance(ratios, list) else []:
        yield CachedLayer(width, _size(inner, "sliding_window", 128))
        if isinstance(ratio, int) and ratio > 0:
            yield CachedLayer(width, tokens=ratio, index_bytes=_index_bytes(inner) if ratio == 4 else 0)


def _state_bytes(inner: Mapping[str, object]) -> int:
    # Engines keep it in float32 unless `mamba_ssm_dtype` says otherwise (SGLang `configs/mamba_utils.py`).
    kinds = [kind for kind in layer_kinds(inner) if kind.startswith(RECURRENT_LAYERS)]
    linear = inner.get("linear_attn_config")  # Kimi-Linear
    sizes = [prod(_size(inner, key) for key in keys) for keys in STATES]
    if isinstance(linear, dict):
        sizes.append(_size(linear, "num_heads") * _size(linear, "head_dim") ** 2)
    if isinstance(inner.get("attn_type_list"), list):  # MiniMax
        sizes.append(_size(inner, "num_attention_heads") * _head_dim(inner) ** 2)
    each = 2 if inner.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4
    return max(sizes) * each * sum(not kind.startswith(STATELESS) for kind in kinds)


def _recurrent(inner: Mapping[str, object]) -> bool:
    keeping = [kind for kind in layer_kinds(inner) if not kind.startswith(MLPS)]
    return any(kind.startswith(RECURRENT_LAYERS) for kind in keeping) or any(map(inner.get, RECURRENT_KEYS))


def _head_dim(inner: Mapping[str, object]) -> int:
    return _size(inner, "head_dim") or _size(inner, "hidden_size") // _size(inner, "num_attention_heads", 1)


def _weights(
    inner: Mapping[str, object], inside: float, of_attention: float, of_experts: float
) -> tuple[int, int, int]:
    """Bytes of all weights and of the routed experts among them, and parameters that one token is multiplied with.

    Args:
        inner: the language model's part of config.json.
        inside: bits of a weight of an MLP.
        of_attention: and of one of attention.
        of_experts: and of one of routed experts.
    """
    hidden, experts, kinds = _size(inner, "hidden_size"), _first(inner, EXPERTS), layer_kinds(inner)
    ends = _size(inner, "vocab_size") * hidden * (1 if inner.get("tie_word_embeddings") else 2)
    matrices, dense, sparse = _mlps(inner, kinds)
    each = _size(inner, "moe_intermediate_size", _size(inner, "intermediate_size"))
    expert = matrices * (_first(inner, EXPERT_WIDTHS) or hidden) * each * sparse
    shared = _first(inner, SHARED_EXPERTS) or int(inner.get("model_type") == "llama4_text")  # Llama 4 does not say it
    shared *= _size(inner, "moe_shared_expert_intermediate_size", each)
    shared = sparse * (shared or _size(inner, "shared_expert_intermediate_size"))  # the second: Qwen
    mlp = matrices * hidden * ((_first(inner, DENSE_WIDTHS) or _size(inner, "intermediate_size")) * dense + shared)
    attention, routed = sum(_mixer(inner, hidden, kind) for kind in kinds), expert * experts
    whole = mlp * inside + routed * of_experts + attention * of_attention + ends * 16
    return int(whole / 8), int(routed * of_experts / 8), mlp + expert * _first(inner, CHOSEN) + attention + ends


def _mlps(inner: Mapping[str, object], kinds: Sequence[str]) -> tuple[int, int, int]:
    # Matrices of an MLP, and numbers of layers with a dense one and with experts.
    if {"mlp", "moe"} & set(kinds):  # Nemotron-H, whose MLPs are layers, of two matrices each
        return 2, kinds.count("mlp"), kinds.count("moe")
    if inner.get("enable_moe_block"):  # Gemma 4 has both in every layer
        return 3, len(kinds), len(kinds)
    if not _first(inner, EXPERTS):
        return 3, len(kinds), 0
    listed, step = inner.get("moe_layer_freq"), _size(inner, "interleave_moe_layer_step")  # the second: Llama 4
    sparse = sum(map(bool, listed)) if isinstance(listed, list) else len(kinds) - _size(inner, "first_k_dense_replace")
    sparse = len(kinds) // step if step else sparse
    return 3, len(kinds) - sparse, sparse


def _mixer(inner: Mapping[str, object], hidden: int, kind: str) -> int:
    # What is not the MLP in a layer: attention, or a recurrence of the sizes that are known, else taken to be as large.
    if kind.startswith(MLPS):
        return 0
    heads, groups = _size(inner, "linear_num_value_heads"), _size(inner, "linear_num_key_heads")
    if kind == "linear_attention" and heads and groups:  # Qwen3-Next, Qwen3.5: q, k; v, its gate and the output
        keys, values = groups * _size(inner, "linear_key_head_dim"), heads * _size(inner, "linear_value_head_dim")
        return hidden * (2 * keys + 3 * values)
    linear = inner.get("linear_attn_config")
    if kind == "linear_attention" and isinstance(linear, dict):  # Kimi-Linear: q, k, v and the output, and K3's gate
        matrices = 5 if linear.get("use_full_rank_gate") else 4
        return matrices * hidden * _size(linear, "num_heads") * _size(linear, "head_dim")
    if kind == "mamba" and (values := _size(inner, "mamba_num_heads") * _size(inner, "mamba_head_dim")):
        return hidden * (3 * values + 2 * _size(inner, "n_groups") * _size(inner, "ssm_state_size"))
    return _attention(inner, hidden)


def _attention(inner: Mapping[str, object], hidden: int) -> int:
    # Grouped queries, or DeepSeek's latent form (Kimi).
    heads = _size(inner, "num_attention_heads", 1)
    rank, output = _size(inner, "kv_lora_rank"), _size(inner, "o_lora_rank")
    if output:  # DeepSeek-V4: one latent vector is keys and values; the output goes through groups of heads
        query, width = _size(inner, "q_lora_rank"), heads * _head_dim(inner)
        return hidden * (query + _head_dim(inner) + _size(inner, "o_groups") * output) + width * (query + output)
    if rank:
        query, nope = _size(inner, "q_lora_rank"), _size(inner, "qk_nope_head_dim")
        rope, value = _size(inner, "qk_rope_head_dim"), _size(inner, "v_head_dim")
        return (
            hidden * (query + rank + rope) + query * heads * (nope + rope) + rank * heads * (nope + value)
            + heads * value * hidden
        )  # fmt: skip
    gate = heads if inner.get("attn_output_gate") else 0
    return hidden * _head_dim(inner) * (2 * (heads + _size(inner, "num_key_value_heads", heads)) + gate)

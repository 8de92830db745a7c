"""A target as its files describe it: sizes, layout on devices, quantisation, and what the embedded engine reads.

`TargetShape` is what a drafter depends on, `TargetLayout` what engines and the planner need (heads, experts, formats,
bytes): only the configuration of a hub model is fetched for them. `TargetConfig` is what the embedded engine runs. All
are read from JSON and safetensors headers without torch.

The embedded engine reads plain weights only. Scales that were left unread would make the answers of a quantised target
meaningless, so a target with any tensor that the engine does not read is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig, TransformerConfig
from dflash_serve.checkpoint.files import IN_CONFIG, QUANT_CONFIG, Header, load_object, read_headers
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.checkpoint.tensors import FLOATS, PACKED, RECOMPUTED
from dflash_serve.deployment import Model, Quantization
from dflash_serve.errors import Problem, UserError

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal models have the sizes of their language model."""
BITS: Mapping[str, float] = {"none": 16, "fp8": 8, "nvfp4": 4.5, "mxfp4": 4.25}
"""Bits per weight with its scales: NVFP4 has 8 bits for 16 values, MXFP4 8 for 32."""
OTHER_BITS = 4.5  # bits per weight of any other method: INT4 with scales (compressed-tensors, AWQ, GPTQ)
FORMATS = {"nvfp4": ("nvfp4", "fp4_pack"), "mxfp4": ("mxfp4",), "fp8": ("fp8", "float-quantized")}
"""Format -> words in a checkpoint's quantisation recipe that identify it."""
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")
RECURRENT_LAYERS = ("linear_attention", "mamba", "conv", "recurrent")
"""Prefixes of names in `layer_types` for layers without keys and values."""
RECURRENT_KEYS = ("hybrid_override_pattern", "linear_attn_config", "linear_num_value_heads", "mamba_d_state", "ssm_cfg")
"""Keys of config.json that only models with recurrent layers have."""
LATENT_WIDTH = 576  # values of a token's latent vector in a layer: DeepSeek's kv_lora_rank 512 and a rotary part of 64
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
    rope_theta: float | None = None  # RoPE base; None = not in config.json


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
        num_layers=required_size(inner, "num_hidden_layers", folder),
        max_position_embeddings=longest if type(longest) is int else None,
        rope_theta=_rope_theta(inner),
    )


def _rope_theta(fields: Mapping[str, object]) -> float | None:
    inside = fields.get("rope_parameters")
    found = inside.get("rope_theta") if isinstance(inside, dict) else fields.get("rope_theta")
    return float(found) if isinstance(found, int | float) else None


def language_model(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config.json that has the language model's sizes."""
    return next((inner for inner in map(raw.get, TEXT_CONFIGS) if isinstance(inner, dict)), raw)


def required_size(fields: Mapping[str, object], key: str, folder: Path) -> int:
    """A positive whole number of the config.json in `folder`.

    Raises:
        UserError: it is absent or something else.
    """
    value = fields.get(key)
    if type(value) is int and value > 0:
        return value
    where = str(folder / "config.json")
    raise UserError(f"{key} is {value!r}, not a positive whole number", where=where, do="give a language model")


def _size(fields: Mapping[str, object], key: str, default: int = 0) -> int:
    value = fields.get(key)
    return value if type(value) is int and value > 0 else default


def _first(fields: Mapping[str, object], keys: Sequence[str]) -> int:
    return next((size for key in keys if (size := _size(fields, key))), 0)


@dataclass(frozen=True)
class TargetLayout:
    """Layout of a target on an engine's devices."""

    shape: TargetShape
    architecture: str  # the first of config.json's `architectures`
    attention_heads: int
    kv_heads: int
    head_dim: int
    latent: bool  # DeepSeek's attention: one latent vector per token instead of keys and values per head
    experts: int  # 0 = dense
    experts_per_token: int  # experts that process one token
    expert_bytes: int  # bytes of the experts among `weight_bytes`
    native_quantization: str | None
    """Format of the checkpoint's weights: fp8, nvfp4, mxfp4, or the name of another method; None = unquantised."""
    head_is_quantized: bool  # lm_head is NVFP4 too
    weight_bytes: int  # bytes on all devices together, estimated from the sizes; accurate to a few per cent
    recurrent: bool  # some layers keep a state instead of keys and values (GDN, Mamba, short convolutions)
    penalises: bool  # generation_config.json penalises repetitions by default in every request (Qwen3-Coder)
    quantized_kv: bool = False  # the checkpoint requests quantised keys and values

    def kv_bytes(self, bytes_each: float) -> int:
        """Bytes of one token's keys and values in all layers and heads."""
        width = LATENT_WIDTH if self.latent else 2 * self.kv_heads * self.head_dim
        return int(self.shape.num_layers * width * bytes_each)


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
    heads = _size(inner, "num_attention_heads", 1)
    native = native_format(recipe)
    weight_bytes, expert_bytes = _weights(inner, model.quantization, native)
    return TargetLayout(
        shape=shape,
        architecture=str(named[0]) if isinstance(named, list) and named else "unknown",
        attention_heads=heads,
        kv_heads=_size(inner, "num_key_value_heads", heads),
        head_dim=_head_dim(inner),
        latent=bool(_size(inner, "kv_lora_rank")),
        experts=_first(inner, EXPERTS),
        experts_per_token=_first(inner, CHOSEN),
        expert_bytes=expert_bytes,
        native_quantization=native,
        head_is_quantized=native == "nvfp4" and not _spares_head(recipe),
        weight_bytes=weight_bytes,
        recurrent=_recurrent(inner),
        penalises=_penalises(folder),
        quantized_kv=bool(recipe.get("kv_cache_quant_algo") or recipe.get("kv_cache_scheme")),
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


def _spares_head(recipe: Mapping[str, object]) -> bool:
    spared = [recipe.get(key) for key in ("exclude_modules", "ignore", "modules_to_not_convert")]
    return any("lm_head" in str(module) for modules in spared if isinstance(modules, list) for module in modules)


def _recurrent(inner: Mapping[str, object]) -> bool:
    kinds = inner.get("layer_types")
    named = isinstance(kinds, list) and any(str(kind).startswith(RECURRENT_LAYERS) for kind in kinds)
    return named or any(inner.get(key) for key in RECURRENT_KEYS)


def _head_dim(inner: Mapping[str, object]) -> int:
    return _size(inner, "head_dim") or _size(inner, "hidden_size") // _size(inner, "num_attention_heads", 1)


def _weights(inner: Mapping[str, object], asked: Quantization, native: str | None) -> tuple[int, int]:
    """Bytes of all weights, and of the routed experts among them."""
    inside = BITS[asked] if asked != "none" else BITS.get(native or "none", OTHER_BITS)
    # FP8 and NVFP4 checkpoints quantise attention too; MXFP4 and INT4 ones keep it in bf16.
    outside = inside if {"fp8", "nvfp4"} & {asked, native} else 16.0
    hidden, layers, experts = _size(inner, "hidden_size"), _size(inner, "num_hidden_layers"), _first(inner, EXPERTS)
    ends = _size(inner, "vocab_size") * hidden * (1 if inner.get("tie_word_embeddings") else 2)
    dense = _size(inner, "first_k_dense_replace") if experts else layers
    wide = _size(inner, "intermediate_size")
    # Three matrices for each MLP or expert.
    one_of_each = 3 * hidden * _size(inner, "moe_intermediate_size", wide) * (layers - dense)
    mlp = 3 * hidden * wide * dense + one_of_each * (experts + _size(inner, "n_shared_experts"))
    whole = mlp * inside + layers * _attention(inner, hidden) * outside + ends * 16
    return int(whole / 8), int(one_of_each * experts * inside / 8)


def _attention(inner: Mapping[str, object], hidden: int) -> int:
    # Grouped queries, or DeepSeek's latent form (Kimi).
    heads = _size(inner, "num_attention_heads", 1)
    rank = _size(inner, "kv_lora_rank")
    if rank:
        query, nope = _size(inner, "q_lora_rank"), _size(inner, "qk_nope_head_dim")
        rope, value = _size(inner, "qk_rope_head_dim"), _size(inner, "v_head_dim")
        return (
            hidden * (query + rank + rope) + query * heads * (nope + rope) + rank * heads * (nope + value)
            + heads * value * hidden
        )  # fmt: skip
    return hidden * _head_dim(inner) * 2 * (heads + _size(inner, "num_key_value_heads", heads))


QKV_BIAS = {"qwen2"}
QK_NORM = {"qwen3"}
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


class TargetConfig(TransformerConfig):
    """Shape of a dense decoder of the Llama and Qwen families."""

    model_type: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()


def read_target_config(folder: Path) -> TargetConfig:
    """Reads `folder/config.json` (transformers 4 and 5 forms).

    Raises:
        UserError: no config.json, a family we do not run, or an impossible value.
    """
    path = folder / "config.json"
    raw = dict(load_object(path, kind="target"))
    if raw.get("model_type") not in SUPPORTED:
        raise UserError(
            f"model_type {raw.get('model_type')!r} is not one the embedded backend runs",
            where=str(path),
            do=f"use one of {', '.join(SUPPORTED)}, or another backend",
        )
    try:
        return _from_dict(raw, folder)
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(f"incomplete or impossible: {_one_line(error)}", where=str(path)) from None


def _from_dict(raw: dict[str, Any], folder: Path) -> TargetConfig:
    family = raw["model_type"]
    attention_bias = bool(raw.get("attention_bias", False))
    eos = raw.get("eos_token_id")
    return TargetConfig(
        model_type=family,
        vocab_size=required_size(raw, "vocab_size", folder),
        hidden_size=required_size(raw, "hidden_size", folder),
        intermediate_size=required_size(raw, "intermediate_size", folder),
        num_attention_heads=required_size(raw, "num_attention_heads", folder),
        num_key_value_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        layers=_layers(raw, required_size(raw, "num_hidden_layers", folder)),
        max_position_embeddings=required_size(raw, "max_position_embeddings", folder),
        rms_norm_eps=raw["rms_norm_eps"],
        rope=_rope(raw),
        qkv_bias=attention_bias or family in QKV_BIAS,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family in QK_NORM,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _layers(raw: dict[str, Any], count: int) -> tuple[AttentionKind, ...]:
    window, kinds = raw.get("sliding_window"), raw.get("layer_types")
    if kinds is None:  # Mistral slides everywhere, Qwen2 behind a switch and from `max_window_layers` on
        first = raw.get("max_window_layers", 0) if raw["model_type"].startswith("qwen") else 0
        slides = bool(window) and raw.get("use_sliding_window", raw["model_type"] == "mistral")
        kinds = ["sliding_attention" if slides and i >= first else "full_attention" for i in range(count)]
    return tuple(AttentionKind(causal=True, window=window if k == "sliding_attention" else None) for k in kinds)


def _rope(raw: dict[str, Any]) -> RopeConfig:
    # transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`.
    known = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = known.pop("rope_theta", None) or raw.get("rope_theta", 10000.0)
    kind = known.pop("rope_type", None) or known.pop("type", "default")
    known.pop("type", None)
    return RopeConfig(theta=theta) if kind == "default" else RopeConfig(theta=theta, scaling=kind, **known)


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return f"missing {error}" if isinstance(error, KeyError) else str(error)


HEAD = "lm_head.weight"
SCHEMES: tuple[tuple[str, frozenset[str]], ...] = (
    ("NVFP4", frozenset({"weight U8", "weight_scale F8_E4M3"})),
    ("NVFP4", frozenset({"weight_packed U8", "weight_scale F8_E4M3"})),
    ("MXFP4", frozenset({"weight U8", "weight_scale U8"})),
    ("MXFP4", frozenset({"weight_packed U8", "weight_scale U8"})),
    ("MXFP8", frozenset({"weight F8_E4M3", "weight_scale U8"})),
    ("FP8 by block", frozenset({"weight F8_E4M3", "weight_scale_inv"})),
    ("FP8 per tensor", frozenset({"weight F8_E4M3", "weight_scale of one"})),
    ("FP8", frozenset({"weight F8_E4M3"})),
    ("FP8", frozenset({"weight F8_E5M2"})),
    ("INT8", frozenset({"weight I8"})),
    ("GPTQ", frozenset({"qweight", "g_idx"})),
    ("AWQ", frozenset({"qweight"})),
    ("INT4", frozenset({"weight_packed I32"})),
)
"""Quantisation schemes and their tensors (last part of the name, dtype); the first scheme that fits is reported."""
KV_SCALES = ("k_scale", "v_scale")  # endings of scales of a quantised K/V cache, which belong to no weight
PLAIN_TARGET = "use its unquantised checkpoint, or an engine that reads it (SGLang, vLLM, TensorRT-LLM)"
ONE_TARGET = "use weights and config.json of one model"


def read_target_headers(folder: Path, config: TargetConfig, problems: list[Problem]) -> dict[str, Header]:
    """The tensors of a target by name; every reason why the embedded engine cannot read them becomes a problem.

    For a quantised target this is the only problem: misfits of its tensors follow from it.
    """
    unreadable: list[Problem] = []
    headers = read_headers(folder, unreadable)
    found = quantisation_problems(folder, headers) or unreadable or list(_misfits(headers, config, folder))
    problems += found
    return headers


def quantisation_problems(folder: Path, headers: Mapping[str, Header]) -> list[Problem]:
    """The problem of a quantised target, by its config.json, hf_quant_config.json or tensors; [] for a plain one.

    Args:
        headers: of its files; empty if they are not fetched yet.

    Raises:
        UserError: one of the two files is no JSON object.
    """
    recipe = read_recipe(load_object(folder / "config.json", kind="target"), folder)
    signs = (f"{name} is {header.dtype}" for name, header in headers.items() if _is_packed(name, header.dtype))
    sign, native = next(signs, None), native_format(recipe)
    if sign is None and native is None:
        return []
    said = f"its recipe says {', '.join(recipe_words(recipe))}" if native else f"tensor {sign}"
    what = f"the target is quantised ({_scheme(recipe, headers)}; {said})"
    what += ", the embedded backend reads float32, bfloat16 and float16 weights only"
    return [Problem(what, str(folder), PLAIN_TARGET)]


def _is_packed(name: str, dtype: str) -> bool:
    return (name.endswith(PACKED) and not name.endswith(KV_SCALES)) or dtype not in {*FLOATS, "I64", "BOOL"}


def _scheme(recipe: Mapping[str, object], headers: Mapping[str, Header]) -> str:
    # By the tensors if they identify it, else by the recipe.
    native = native_format(recipe) or "unknown scheme"
    if native in ("awq", "gptq"):  # both have the same tensor names
        return native.upper()
    kinds: set[str] = set()
    for name, header in headers.items():
        last = name.rpartition(".")[2]
        kinds |= {last, f"{last} {header.dtype}"} | ({f"{last} of one"} if prod(header.shape) == 1 else set())
    shown = next((scheme for scheme, signs in SCHEMES if signs <= kinds), None)
    if shown is None and native == "fp8":
        return "FP8 by block" if recipe.get("weight_block_size") else "FP8"
    return shown or (native.upper() if native in ("nvfp4", "mxfp4") else native)


def _misfits(headers: Mapping[str, Header], config: TargetConfig, folder: Path) -> Iterator[Problem]:
    wanted = dict(_wanted(config))
    for name, shape in wanted.items():
        header = headers.get(name)
        if header is None:
            yield Problem(f"tensor {name} {list(shape)} is missing", str(folder), "use a complete checkpoint")
        elif header.shape != shape:
            what = f"tensor {name} has shape {list(header.shape)}, config.json asks for {list(shape)}"
            yield Problem(what, str(header.file), ONE_TARGET)
        elif header.dtype not in FLOATS:
            yield Problem(f"tensor {name} is {header.dtype}, no floating-point weight", str(header.file), ONE_TARGET)
    for name, header in headers.items():
        if name not in wanted and RECOMPUTED not in name and not (name == HEAD and config.tie_word_embeddings):
            what = f"tensor {name} {list(header.shape)} is not part of a {config.model_type} of this config.json"
            yield Problem(f"{what}, and would not be read", str(header.file), ONE_TARGET)


def _wanted(config: TargetConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that is read, in Hugging Face's names."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    products = {
        **{"self_attn.q_proj": (q, hidden, config.qkv_bias), "self_attn.k_proj": (kv, hidden, config.qkv_bias)},
        **{"self_attn.v_proj": (kv, hidden, config.qkv_bias), "self_attn.o_proj": (hidden, q, config.o_bias)},
        **{"mlp.gate_proj": (inner, hidden, config.mlp_bias), "mlp.up_proj": (inner, hidden, config.mlp_bias)},
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim} if config.qk_norm else {}
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in (f"model.layers.{index}" for index in range(config.num_layers)):
        for module, (outputs, inputs, has_bias) in products.items():
            yield f"{layer}.{module}.weight", (outputs, inputs)
            if has_bias:
                yield f"{layer}.{module}.bias", (outputs,)
        yield from ((f"{layer}.{module}.weight", (size,)) for module, size in norms.items())
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, hidden)

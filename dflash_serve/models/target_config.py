"""Configuration and tensors of a target, as the embedded engine reads them. JSON and safetensors headers; no torch.

The engine reads plain weights only. Scales that were left unread would make the answers of a quantised target
meaningless, so a target with any tensor that the engine does not read is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig
from dflash_serve.checkpoint.files import Header, load_object, read_headers
from dflash_serve.checkpoint.target import native_format, read_recipe, recipe_words, required_size
from dflash_serve.checkpoint.tensors import FLOATS, PACKED, RECOMPUTED
from dflash_serve.common.settings import Frozen, PositiveInt
from dflash_serve.errors import Problem, UserError

QKV_BIAS = {"qwen2"}
QK_NORM = {"qwen3"}
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


class TargetConfig(Frozen):
    """Shape of a dense decoder of the Llama and Qwen families."""

    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    layers: Annotated[tuple[AttentionKind, ...], Field(min_length=1)]
    max_position_embeddings: PositiveInt
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)


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

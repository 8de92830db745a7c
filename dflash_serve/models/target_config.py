"""TargetConfig: what the embedded backend needs to know of a Hugging Face causal LM, read from its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig
from dflash_serve.checkpoint.files import load_object
from dflash_serve.checkpoint.target import required_size
from dflash_serve.common.settings import Frozen, PositiveInt
from dflash_serve.errors import UserError

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
    """transformers 5 keeps everything in `rope_parameters`, 4 in `rope_theta` and `rope_scaling`."""
    known = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = known.pop("rope_theta", None) or raw.get("rope_theta", 10000.0)
    kind = known.pop("rope_type", None) or known.pop("type", "default")
    known.pop("type", None)
    return RopeConfig(theta=theta) if kind == "default" else RopeConfig(theta=theta, scaling=kind, **known)


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return f"missing {error}" if isinstance(error, KeyError) else str(error)

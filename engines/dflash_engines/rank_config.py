"""What the config.json of a TensorRT-LLM checkpoint says of a Llama or Mistral, field by field.

ModelOpt reads `rope_theta` and `rope_scaling`, which transformers 5 keeps in `rope_parameters`: it writes neither, and
TensorRT-LLM then takes base 10000 without scaling, an engine that builds and answers garbage. So every field comes from
the model's own configuration, as `LLaMAConfig.from_hugging_face` takes it (TensorRT-LLM
`tensorrt_llm/models/llama/config.py` @04100fd).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_serve.errors import UserError

DECODERS = {"llama": "llama", "mistral": "llama"}
"""transformers' model_type -> ModelOpt's decoder_type."""
SCALINGS = ("llama3", "linear", "dynamic")
"""Kinds of RoPE scaling that its Llama computes."""
QWEN = (
    "its rank files need q_norm, k_norm or biases, its config.json qwen_type and seq_length, and "
    "ModelOpt exports none of them; NVIDIA's own path to FP8 fails too (TensorRT-LLM #9298, #8570)"
)
REASONS = {"qwen2": QWEN, "qwen3": QWEN}


def refuse(config: Any) -> None:
    """Stops before hours of work for a target whose engine would not build, or would answer garbage.

    Args:
        config: the target's configuration, as transformers reads it.

    Raises:
        UserError: trtllm-build has no way, or no field, for it.
    """
    kind = str(config.model_type)
    reasons = {
        REASONS.get(kind, "only Llama and Mistral are known to build"): kind not in DECODERS,
        "its attention has biases": bool(getattr(config, "attention_bias", False)),
        "its MLP has biases": bool(getattr(config, "mlp_bias", False)),
        "it attends to a sliding window, for which the checkpoint has no field": _window(config) is not None,
        f"its RoPE is scaled by {_rope_type(config)!r}": _rope_type(config) not in ("default", *SCALINGS),
    }
    for reason, applies in reasons.items():
        if applies:
            what = f"trtllm-build does not serve a {kind} like this: {reason}"
            do = "leave it out: SGLang, vLLM and trtllm-serve load the Hugging Face checkpoint as it is"
            raise UserError(what, where="build.checkpoints", do=do)


def rank_config(exported: Mapping[str, object], config: Any) -> dict[str, object]:
    """ModelOpt's config.json with every field that TensorRT-LLM reads of a Llama.

    Args:
        exported: what ModelOpt wrote: the split, the quantisation, the vocabulary as it padded it, its own remarks.
        config: the target's configuration, as transformers reads it.
    """
    heads = config.num_attention_heads
    scaling = {name: value for name, value in _rope(config).items() if name != "rope_theta"}
    return {
        **exported,
        "architecture": config.architectures[0],
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act,
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": float(_rope(config).get("rope_theta", 10000.0)),
        # Its attention looks for `type`, its configuration for `rope_type`.
        "rotary_scaling": None if _rope_type(config) == "default" else {**scaling, "type": _rope_type(config)},
        "attn_bias": False,
        "mlp_bias": False,
        "residual_mlp": False,
        "disable_weight_only_quant_plugin": False,
        "remove_duplicated_kv_heads": False,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
    }


def _rope(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _rope_type(config: Any) -> str:
    return str(_rope(config).get("rope_type", "default"))


def _window(config: Any) -> int | None:
    """A window shorter than the model's positions; None = it sees all of them."""
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and window < config.max_position_embeddings else None

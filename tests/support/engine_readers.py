"""How each engine reads a drafter's config.json and its fused weights: its own rules, transcribed, with their lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.checkpoint.formats import FP8_MAX, QuantizedTensor

Raw = Mapping[str, Any]
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Reading:
    """What an engine makes of a config.json."""

    layers: tuple[AttentionKind, ...]
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int | None
    """None = the engine does not read it, it is told K = B - 1."""


def vllm(raw: Raw) -> Reading:
    """vLLM 0.32 and 0.33: `model_executor/models/qwen3_dflash.py` and `transformers_utils/configs/speculators/`."""
    block = None
    if "speculators_model_type" in raw:  # base.py:60, algos.py:91 update_dflash
        block = raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] + 1  # base.py:122
        dflash = {
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [index - 1 for index in raw["aux_hidden_state_layer_ids"]],
            "causal": not raw.get("sliding_window_non_causal", True),
        }
        raw = {**raw["transformer_layer_config"], "dflash_config": dflash}
    layers = tuple(_vllm_layer(raw, index) for index in range(raw["num_hidden_layers"]))
    dflash = raw["dflash_config"]
    return Reading(layers, tuple(dflash["target_layer_ids"]), dflash["mask_token_id"], block)


def _vllm_layer(raw: Raw, index: int) -> AttentionKind:
    """qwen3_dflash.py:86 _dflash_layer_causal and :120 _resolve_layer_attention."""
    dflash, types = raw["dflash_config"], raw.get("layer_types")
    use_swa = dflash.get("use_swa", False)
    slides = use_swa if types is None or (use_swa and SLIDING not in types) else types[index] == SLIDING
    window = dflash.get("swa_window_size", raw.get("sliding_window")) if slides else None
    if raw.get("is_causal") is not None:
        return AttentionKind(window=window, causal=raw["is_causal"])
    if dflash.get("causal") is not None:
        return AttentionKind(window=window, causal=dflash["causal"])
    return AttentionKind(window=window, causal=types is not None and types[index] == SLIDING)


def sglang(raw: Raw) -> Reading:
    """SGLang 0.5.22-0.5.23: `models/dflash.py:157-196`, `speculative/dflash_utils.py:400-420, 588-805`."""
    dflash = raw.get("dflash_config") or {}

    def key(name: str) -> Any:  # in dflash_config first, then at top level
        return dflash.get(name, raw.get(name))

    layers = []
    for kind in raw["layer_types"]:
        window = raw["sliding_window"] if kind == SLIDING else None
        causal = kind == SLIDING if key("is_causal") is None else key("is_causal")
        layers.append(AttentionKind(window=window, causal=causal))
    return Reading(tuple(layers), tuple(key("target_layer_ids")), key("mask_token_id"), key("block_size") or 16)


def tensorrt_llm(raw: Raw) -> Reading:
    """TensorRT-LLM: `_torch/models/modeling_dflash.py` @009d8fa, `pyexecutor/config_utils.py`."""
    dflash, layers = raw["dflash_config"], []
    for kind in raw["layer_types"]:  # _get_attention_mask_args, get_layer_attention_window
        window = raw["sliding_window"] if kind == SLIDING and raw.get("use_sliding_window") is not False else None
        causal = window is not None
        if dflash.get("use_swa") and kind == SLIDING:  # dspark_layer_window_size
            window = dflash["swa_window_size"]
        layers.append(AttentionKind(window=window, causal=causal))
    return Reading(tuple(layers), tuple(dflash["target_layer_ids"]), dflash["mask_token_id"], raw["block_size"])


def tensorrt_llm_quantization(raw: Raw) -> str | None:
    """The algorithm that TensorRT-LLM takes a target for: `_torch/model_config.py`, `load_hf_quant_config`.

    compressed-tensors are read as weights with quantised activations, whatever they are.
    """
    found = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    if found is None:
        return None
    method = found["quant_method"]
    if method == "compressed-tensors":
        group = found["config_groups"]["group_0"]
        return {"channel": "FP8_PER_CHANNEL_PER_TOKEN"}[group["input_activations"]["strategy"]]
    algorithms: dict[str, str] = {"mxfp4": "W4A8_MXFP4_MXFP8", "fp8": "FP8_BLOCK_SCALES"}
    return str(found["quant_algo"]) if method == "modelopt" else algorithms[method]


READERS: Mapping[str, Callable[[Raw], Reading]] = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm}


def fused_by_tensorrt_llm(parts: Sequence[QuantizedTensor]) -> Tensor:
    """The weight [out, in] of a fused product: `_torch/modules/linear.py` @00bbf71e.

    `NVFP4LinearMethod.load_weight_scales` asserts; `FP8QDQLinearMethod.rescale_fused_weights` takes the largest.
    """
    if parts[0].format == "nvfp4":
        for name in ("weight_scale_2", "input_scale"):
            scales = [part.state("")[f".{name}"] for part in parts]
            assert all(torch.equal(scale, scales[0]) for scale in scales), f"The {name} should be same for all"
    return _by_largest(parts, torch.float32)


def fused_by_sglang(parts: Sequence[QuantizedTensor]) -> Tensor:
    """SGLang 0.5.23: `layers/quantization/modelopt_quant.py:619` (FP8) and :1888 (NVFP4).

    vLLM 0.32 has the same two: `model_executor/layers/quantization/modelopt.py:2150` and :2062, with a warning.
    """
    return _by_largest(parts, torch.float16)


def _by_largest(parts: Sequence[QuantizedTensor], between: torch.dtype) -> Tensor:
    """One scale for all: FP8 parts are decoded to `between` and rounded again, NVFP4 parts keep their bits."""
    if parts[0].format == "nvfp4":
        largest = torch.stack([part.scale_2 for part in parts if part.scale_2 is not None]).max()
        return torch.cat([QuantizedTensor("nvfp4", p.values, p.scale, largest).dequantize() for p in parts])
    largest = torch.stack([part.scale for part in parts]).max()
    decoded = torch.cat([part.values.to(between) * part.scale for part in parts])
    again = (decoded.float() / largest).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return QuantizedTensor("fp8", again, largest).dequantize()


FUSED_BY: Mapping[str, Callable[[Sequence[QuantizedTensor]], Tensor]] = {
    "vllm": fused_by_sglang,
    "sglang": fused_by_sglang,
    "tensorrt-llm": fused_by_tensorrt_llm,
}

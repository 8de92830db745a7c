"""Legacy checkpoints for trtllm-build, one file a rank.

trtllm-build ended with TensorRT-LLM 1.3.0rc20 and never knew DFlash: its engines serve a Llama or Mistral without
speculation.

ModelOpt reads `rope_theta` and `rope_scaling`, which transformers 5 keeps in `rope_parameters`. It writes neither, and
TensorRT-LLM then takes base 10000 without scaling: an engine that builds and answers garbage. So every field of
config.json comes from the model's own configuration, as `LLaMAConfig.from_hugging_face` takes it (TensorRT-LLM
`tensorrt_llm/models/llama/config.py` @04100fd).
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_serve.common.documents import read_json
from dflash_serve.common.extras import import_extra
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError

from .pipeline import Measured, Work, quietly
from .quantize import BOUNDS, compare, quantized_model, source_in_bf16
from .recipe import Checkpoints

LAST = "1.3.0rc20"
BATCH = 32  # requests at once where the recipe leaves limits.max_batch_size open
PROJECTIONS = (("gate_proj", "fc", 0), ("up_proj", "gate", 0), ("down_proj", "proj", 1))
"""Hugging Face's name of a product of the MLP, TensorRT-LLM's, and the axis that its ranks cut."""
FAMILIES = ("llama", "mistral")  # transformers' model_type
SCALINGS = ("default", "llama3", "linear", "dynamic")  # kinds of RoPE scaling that its Llama computes
UNKNOWN = "only Llama and Mistral are known to build"
QWEN = (
    "its rank files need q_norm, k_norm or biases, its config.json qwen_type and seq_length, and "
    "ModelOpt exports none of them; NVIDIA's own path to FP8 fails too (TensorRT-LLM #9298, #8570)"
)


def write_checkpoints(work: Work, deployment: Deployment, wanted: Checkpoints) -> Measured:
    """Step `trtllm-checkpoints`: tp1/, tp2/, ... with config.json, rank files and the command to build each."""
    config = import_extra("engines", "transformers").AutoConfig.from_pretrained(work.inputs["target"])
    heads = config.num_attention_heads
    source = source_in_bf16(work)
    with quietly():
        export = import_extra("engines", "modelopt.torch.export").export_tensorrt_llm_checkpoint
        model = quantized_model(work, "fp8" if wanted.precision == "fp8" else None)
    measured: Measured = {"legacy": f"trtllm-build ended with {LAST}"}
    for size in wanted.tensor:
        work.say(f"{size} ranks")
        folder = work.folder / f"tp{size}"
        with quietly():
            export(copy.deepcopy(model), "llama", torch.bfloat16, str(folder), inference_tensor_parallel=size)
        path = folder / "config.json"
        exported = read_json(path)
        path.write_text(json.dumps(rank_config(exported, config), indent=2) + "\n", encoding="utf-8")
        found = compare(source, reassemble(folder), BOUNDS["fp8"])
        argv = build_command(folder, deployment, size, wanted.precision)
        splits = heads % size == 0
        (folder / "trtllm-build.json").write_text(json.dumps({"legacy": True, "argv": argv}, indent=2) + "\n")
        measured[f"tp{size}"] = {
            "worst_tensor": found["worst_tensor"],
            "worst_error": found["worst_error"],
            "servable": True if splits else f"no: {heads} heads do not split into {size}",
            "engine": _build(argv, folder) if splits else "not built here",
        }
    return measured


def build_command(folder: Path, deployment: Deployment, size: int, precision: str) -> list[str]:
    """trtllm-build's argv (tensorrt_llm/commands/build.py @008b2b8): one engine a rank."""
    limits = deployment.limits
    length = str(limits.max_model_len or 8192)
    argv = ["trtllm-build", "--checkpoint_dir", folder.name, "--output_dir", f"{folder.name}-engine"]
    argv += ["--max_batch_size", str(limits.max_batch_size or BATCH), "--max_seq_len", length]
    argv += ["--max_num_tokens", str(limits.max_num_tokens or 8192), "--gemm_plugin", "auto", "--workers", str(size)]
    return argv + (["--use_fp8_context_fmha", "enable"] if precision == "fp8" else [])


def _build(argv: list[str], folder: Path) -> str:
    if shutil.which(argv[0]) is None:
        return "not built here: there is no trtllm-build"
    done = subprocess.run(argv, cwd=folder.parent, capture_output=True, text=True, check=False)  # noqa: S603
    return "built" if done.returncode == 0 else f"failed: {(done.stderr.splitlines() or ['no message'])[-1]}"


def reassemble(folder: Path) -> dict[str, Tensor]:
    """All ranks' files as the whole model's plain fp32 weights, under Hugging Face's names."""
    config = read_json(folder / "config.json")
    size = config["mapping"]["tp_size"]
    ranks = [load_file(folder / f"rank{rank}.safetensors") for rank in range(size)]
    q_rows, kv_rows = (config[f"num_{kind}_heads"] * config["head_size"] for kind in ("attention", "key_value"))
    whole = {
        "model.embed_tokens.weight": _stack(ranks, "transformer.vocab_embedding", 0, config["vocab_size"]),
        "lm_head.weight": _stack(ranks, "lm_head", 0, config["vocab_size"]),
        "model.norm.weight": ranks[0]["transformer.ln_f.weight"].float(),
    }
    for index in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{index}", f"transformer.layers.{index}"
        for mine, other in (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "post_layernorm")):
            whole[f"{ours}.{mine}.weight"] = ranks[0][f"{theirs}.{other}.weight"].float()
        whole |= _attention(ranks, f"{theirs}.attention", f"{ours}.self_attn", q_rows, kv_rows)
        for mine, other, axis in PROJECTIONS:
            whole[f"{ours}.mlp.{mine}.weight"] = _stack(ranks, f"{theirs}.mlp.{other}", axis, None)
    return whole


def _attention(ranks: list[dict[str, Tensor]], theirs: str, ours: str, q_rows: int, kv_rows: int) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    for rank in ranks:
        fused = _plain(rank, f"{theirs}.qkv")
        q = q_rows // len(ranks)
        kv = (len(fused) - q) // 2
        for name, part in zip(parts, fused.split([q, kv, kv]), strict=True):
            parts[name].append(part)
    copies = max(1, sum(len(part) for part in parts["k_proj"]) // kv_rows)  # K/V heads repeated on neighbours
    whole = {f"{ours}.q_proj.weight": torch.cat(parts["q_proj"])}
    for name in ("k_proj", "v_proj"):
        whole[f"{ours}.{name}.weight"] = torch.cat(parts[name][::copies])
    return {**whole, f"{ours}.o_proj.weight": _stack(ranks, f"{theirs}.dense", 1, None)}


def _stack(ranks: list[dict[str, Tensor]], module: str, axis: int, rows: int | None) -> Tensor:
    # The ranks' parts side by side; `rows` cuts padding off and undoes copies.
    parts = [_plain(rank, module) for rank in ranks]
    return parts[0] if rows is not None and len(parts[0]) == rows else torch.cat(parts, dim=axis)[:rows]


def _plain(rank: Mapping[str, Tensor], module: str) -> Tensor:
    weight, scale = rank[f"{module}.weight"].float(), rank.get(f"{module}.weights_scaling_factor")
    return weight if scale is None else weight * scale.float()


def refuse(config: Any) -> None:
    """Stops before hours of work for a target whose engine would not build, or would answer garbage.

    Args:
        config: the target's configuration, as transformers reads it.

    Raises:
        UserError: trtllm-build has no way, or no field, for it.
    """
    kind, window = str(config.model_type), getattr(config, "sliding_window", None)
    slides = isinstance(window, int) and window < config.max_position_embeddings
    reasons = {
        QWEN if kind in ("qwen2", "qwen3") else UNKNOWN: kind not in FAMILIES,
        "its attention has biases": getattr(config, "attention_bias", False),
        "its MLP has biases": getattr(config, "mlp_bias", False),
        "it attends to a sliding window, for which the checkpoint has no field": slides,
        f"its RoPE is scaled by {_rope_type(config)!r}": _rope_type(config) not in SCALINGS,
    }
    for reason, applies in reasons.items():
        if applies:
            what = f"trtllm-build does not serve a {kind} like this: {reason}"
            do = "leave it out: SGLang, vLLM and trtllm-serve load the Hugging Face checkpoint as it is"
            raise UserError(what, where="build.checkpoints", do=do)


def rank_config(exported: Mapping[str, object], config: Any) -> dict[str, object]:
    """ModelOpt's config.json with every field that TensorRT-LLM reads of a Llama.

    Args:
        exported: ModelOpt's config.json: the split, the quantisation, the padded vocabulary, its own remarks.
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

"""The drafter in FP8 or NVFP4, in z-lab's layout with ModelOpt's tensors.

ModelOpt's own exporter of DFlash drafters names excluded modules after its training wrapper ("dflash_module.fc",
"model*"), and `model*` would exclude every layer of an engine that calls them `model.layers.*`. Here they carry the
engines' names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import DIALECTS, Target
from dflash_serve.checkpoint.formats import FP4_MAX, FP8_MAX, GROUP, Format, dequantized
from dflash_serve.checkpoint.quantization import QUANT_CONFIG
from dflash_serve.checkpoint.reader import load_tensors, load_weights, open_checkpoint

from .calibration import read_ranges
from .compare import BOUNDS, compare
from .environment import need
from .modelopt import configuration, quietly
from .step import Measured, Work

EXCLUDED = ("fc", "lm_head", "embed_tokens", "model.embed_tokens")
"""fc makes the context feature of every layer at once: its error would be in all of them."""


def quantize_drafter(work: Work, format: Format) -> Measured:
    """Step `drafter-fp8` and `drafter-nvfp4`."""
    checkpoint = open_checkpoint(work.inputs["drafter"])
    tensors = load_tensors(checkpoint)
    config = checkpoint.config
    assert config is not None
    ranges = read_ranges(work.inputs["drafter-ranges"])
    state = quantized_state(tensors, ranges, format)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, work.folder / "model.safetensors")
    for name, fields in _config_files(config, format).items():
        (work.folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    written, weights = load_weights(work.folder)
    assert written == config
    measured = compare(tensors, dequantized(weights, torch.float32), BOUNDS[format])
    size = (work.folder / "model.safetensors").stat().st_size
    return {**measured, "bytes": size, "bytes_of_source": sum(t.numel() * t.element_size() for t in tensors.values())}


def quantized_state(tensors: Mapping[str, Tensor], ranges: Mapping[str, Tensor], format: Format) -> dict[str, Tensor]:
    """Every tensor by z-lab's names; ModelOpt quantises the layers' products, from their weights alone."""
    with quietly():
        mtq, utils = need("modelopt.torch.quantization"), need("modelopt.torch.export.quant_utils")
        root = _skeleton(tensors)
        mtq.quantize(root, configuration(format))
        state = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items() if not _is_product(name)}
        for name in filter(_is_product, tensors):
            module = name.removesuffix(".weight")
            linear: Any = root.get_submodule(module)
            linear.input_quantizer.amax = ranges[module].float()
            scale, scale_2 = utils.get_weight_scaling_factor(linear), utils.get_weight_scaling_factor_2(linear)
            kind, block = utils.get_quantization_format(linear), utils.get_weight_block_size(linear)
            state[name] = utils.to_quantized_weight(linear.weight, scale, kind, scale_2, block).detach()
            state[f"{module}.weight_scale"] = scale.detach().squeeze() if format == "fp8" else scale.detach()
            state[f"{module}.input_scale"] = input_scale(ranges[module], format)
            if scale_2 is not None:
                state[f"{module}.weight_scale_2"] = scale_2.detach().float().squeeze()
    return state


def input_scale(amax: Tensor, format: Format) -> Tensor:
    """Scale of the activations, fp32: amax / 448, and NVFP4's second level another 6."""
    return amax.float().reshape(()) / (FP8_MAX * (FP4_MAX if format == "nvfp4" else 1.0))


def _is_product(name: str) -> bool:
    return name.startswith("layers.") and name.endswith("_proj.weight")


def _skeleton(tensors: Mapping[str, Tensor]) -> nn.Module:
    """The layers' products as bare Linear modules under their names: all that ModelOpt has to see."""
    root = nn.Module()
    for name in filter(_is_product, tensors):
        *path, leaf = name.removesuffix(".weight").split(".")
        room = root
        for part in path:
            if not hasattr(room, part):
                room.add_module(part, nn.Module())
            room = room.get_submodule(part)
        out, inner = tensors[name].shape
        linear = nn.Linear(inner, out, bias=False, dtype=torch.bfloat16)
        linear.weight.data = tensors[name].to(torch.bfloat16)
        room.add_module(leaf, linear)
    return root


def _config_files(config: DrafterConfig, format: Format) -> dict[str, dict[str, object]]:
    """config.json and hf_quant_config.json: the same facts in the two forms that engines look for."""
    producer = {"name": "modelopt", "version": need("modelopt").__version__}
    facts: dict[str, object] = {
        "quant_algo": format.upper(),
        "kv_cache_quant_algo": None,
        "exclude_modules": list(EXCLUDED),
    }
    if format == "nvfp4":
        facts["group_size"] = GROUP
    inline = {"quant_method": "modelopt", "producer": producer, **facts, "ignore": list(EXCLUDED)}
    fields = DIALECTS["zlab"].write(config, Target())
    return {
        "config.json": {**fields, "dtype": "bfloat16", "torch_dtype": "bfloat16", "quantization_config": inline},
        QUANT_CONFIG: {"producer": producer, "quantization": facts},
    }

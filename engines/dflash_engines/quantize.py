"""Target and drafter in FP8 or NVFP4, by ModelOpt on a CPU, each read back and compared with its source.

The target keeps Hugging Face's form and is calibrated on its own answers. The drafter keeps z-lab's layout, with
ModelOpt's tensors: ModelOpt's own exporter of DFlash drafters names excluded modules after its training wrapper
("dflash_module.fc", "model*"), and `model*` would exclude every layer of an engine that calls them `model.layers.*`.
Here they carry the engines' names.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.files import INDEX, QUANT_CONFIG, SINGLE, TOKENIZERS, load_object
from dflash_serve.checkpoint.formats import (
    GROUP,
    Format,
    QuantizedTensor,
    dequantized,
    quantize,
    relative_error,
    stored_tensors,
)
from dflash_serve.checkpoint.reader import DIALECTS, load_tensors, load_weights, open_checkpoint
from dflash_serve.checkpoint.storage import Scheme
from dflash_serve.checkpoint.tensors import FUSED, SCALES
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.common.documents import read_json
from dflash_serve.common.extras import import_extra
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter

from .calibration import AMAX, read_answers
from .pipeline import Measured, Work, quietly
from .recipe import Integers

EXCLUDED = ("fc", "lm_head", "embed_tokens", "model.embed_tokens")
"""Modules that stay in bf16. fc makes the context features of every layer: its error would be in all of them."""
TOKENIZER = (*TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt")
"""Files of the target that are copied as they are."""
BOUNDS: Mapping[Format, float] = {"fp8": 0.04, "nvfp4": 0.15, "int8": 0.02, "w8a16": 0.02, "w4a16": 0.2}
"""Largest relative error of a correctly quantised weight."""
GROUP_SIZES = (128, 64, 32)
"""Columns that share a scale of W4A16: the largest number that divides the input; else a scale is a whole row's."""
BACKEND = "dflash_cpu_nvfp4"
"""Our NVFP4 in ModelOpt's registry: its own is a CUDA kernel."""


def quantize_drafter(work: Work, format: Format) -> Measured:
    """Steps `drafter-fp8` and `drafter-nvfp4`: the quantised drafter, and how far each tensor is from its source."""
    checkpoint = open_checkpoint(work.inputs["drafter"])
    tensors, config = load_tensors(checkpoint), checkpoint.config
    assert config is not None
    state = quantized_state(config, tensors, load_file(work.inputs["drafter-ranges"] / AMAX), format)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, work.folder / SINGLE)
    for name, fields in _config_files(config, format).items():
        (work.folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return _measured(work, config, tensors, format)


def round_drafter(work: Work, format: Integers) -> Measured:
    """Steps `drafter-int8`, `-w8a16` and `-w4a16`: the layers' products as integers, in compressed-tensors' layout."""
    checkpoint = open_checkpoint(work.inputs["drafter"])
    tensors, config = load_tensors(checkpoint), checkpoint.config
    assert config is not None
    state, quantised = dict[str, Tensor](), dict[str, Scheme]()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not (name.startswith("layers.") and name.endswith("_proj.weight")):
            state[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            continue
        group = next((size for size in GROUP_SIZES if tensor.shape[1] % size == 0), 0) if format == "w4a16" else 0
        scheme = Scheme(format, "compressed-tensors", "group" if group else "channel", group)
        weight = quantize(tensor.to(torch.bfloat16), format, group=group)
        quantised[module] = scheme
        state |= {f"{module}.{leaf}": part for leaf, part in stored_tensors(scheme, weight).items()}
    written = work.folder / ".written"
    write_drafter(written, config, state, quantised=quantised)
    for path in written.iterdir():
        path.rename(work.folder / path.name)
    written.rmdir()
    return _measured(work, config, tensors, format)


def _measured(work: Work, config: DrafterConfig, tensors: Mapping[str, Tensor], format: Format | Integers) -> Measured:
    # The written drafter, read back and held against its source.
    written, weights = load_weights(work.folder)
    assert written == config
    measured = compare(tensors, dequantized(weights, torch.float32), BOUNDS[format])
    size = (work.folder / SINGLE).stat().st_size
    return {**measured, "bytes": size, "bytes_of_source": sum(t.numel() * t.element_size() for t in tensors.values())}


def quantized_state(
    config: DrafterConfig, tensors: Mapping[str, Tensor], ranges: Mapping[str, Tensor], format: Format
) -> dict[str, Tensor]:
    """Every tensor by z-lab's names; ModelOpt quantises the layers' products, from their weights alone."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(state, assign=True)
    with quietly():
        mtq = import_extra("engines", "modelopt.torch.quantization")
        utils = import_extra("engines", "modelopt.torch.export.quant_utils")
        mtq.quantize(drafter, modelopt_configuration(format))
        products: dict[str, Any] = {name: m for name, m in drafter.named_modules() if name.endswith("_proj")}
        for module, linear in products.items():
            linear.input_quantizer.amax = ranges[module].float()
        _share_scales(products)
        for module, linear in products.items():
            scale, scale_2 = utils.get_weight_scaling_factor(linear), utils.get_weight_scaling_factor_2(linear)
            kind, block = utils.get_quantization_format(linear), utils.get_weight_block_size(linear)
            state[f"{module}.weight"] = utils.to_quantized_weight(linear.weight, scale, kind, scale_2, block).detach()
            state[f"{module}.weight_scale"] = scale.detach().squeeze() if format == "fp8" else scale.detach()
            state[f"{module}.input_scale"] = utils.get_activation_scaling_factor(linear).float().squeeze()
            if scale_2 is not None:
                state[f"{module}.weight_scale_2"] = scale_2.detach().float().squeeze()
    return state


def _share_scales(modules: Mapping[str, Any]) -> None:
    """Gives products that engines fuse (`FUSED`) one range of weights and one of inputs, before they are encoded.

    ModelOpt's exporter of targets does so for NVFP4 and not for FP8, whose parts engines would round again.
    """
    fuse = import_extra("engines", "modelopt.torch.export.quant_utils").preprocess_linear_fusion
    for parent in {module.rpartition(".")[0]: None for module in modules}:
        for parts in FUSED.values():
            group = [modules.get(f"{parent}.{part}") for part in parts]
            if None not in group:
                fuse(group)


def _config_files(config: DrafterConfig, format: Format) -> dict[str, dict[str, object]]:
    # config.json and hf_quant_config.json: the same facts in the two forms that engines look for.
    producer = {"name": "modelopt", "version": import_extra("engines", "modelopt").__version__}
    excluded = list(EXCLUDED)
    facts: dict[str, object] = {"quant_algo": format.upper(), "kv_cache_quant_algo": None, "exclude_modules": excluded}
    if format == "nvfp4":
        facts["group_size"] = GROUP
    beside: dict[str, object] = {"producer": producer, "quantization": facts}
    convert = import_extra("engines", "modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    inline = {**convert(beside), **facts}  # compressed-tensors' config_groups for some engines, our facts for others
    fields = DIALECTS["zlab"].write(config, None)
    return {
        "config.json": {**fields, "dtype": "bfloat16", "torch_dtype": "bfloat16", "quantization_config": inline},
        QUANT_CONFIG: beside,
    }


def quantize_target(work: Work, format: Format) -> Measured:
    """Steps `target-fp8` and `target-nvfp4`: the quantised target, and how far each tensor is from its source."""
    with quietly():
        export = import_extra("engines", "modelopt.torch.export").export_hf_checkpoint
        model = quantized_model(work, format)
        _share_scales(dict(model.named_modules()))
        export(model, export_dir=work.folder)
    for path in (path for pattern in TOKENIZER for path in work.inputs["target"].glob(pattern)):
        shutil.copyfile(path, work.folder / path.name)
    _name_modules_as_engines_do(work.folder)
    source = source_in_bf16(work)
    measured = compare(source, decoded(read_checkpoint(work.folder)), BOUNDS[format])
    size = sum(path.stat().st_size for path in work.folder.glob("*.safetensors"))
    return {**measured, "bytes": size, "bytes_of_source_in_bf16": sum(2 * t.numel() for t in source.values())}


def source_in_bf16(work: Work) -> dict[str, Tensor]:
    """The target's tensors as they were quantised: from bf16; in fp32, to compare with."""
    return {name: tensor.to(torch.bfloat16).float() for name, tensor in read_checkpoint(work.inputs["target"]).items()}


def quantized_model(work: Work, format: Format | None) -> Any:
    """The target with ModelOpt's calibrated quantisers in it; None = plain bf16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.inputs["target"], dtype=torch.bfloat16).eval()
    if format is None:
        return model
    answers = [torch.tensor([prompt + reply]) for prompt, reply in read_answers(work.inputs["answers"])]

    def calibrate(calibrated: Any) -> None:
        with torch.inference_mode():
            for number, ids in enumerate(answers, start=1):
                work.say(f"calibrating on answer {number} of {len(answers)}")
                calibrated(ids)

    return import_extra("engines", "modelopt.torch.quantization").quantize(
        model, modelopt_configuration(format, kv_cache=True), calibrate
    )


def _name_modules_as_engines_do(folder: Path) -> None:
    # config.json gets the facts of hf_quant_config.json, under the names that engines give the modules.
    path = folder / "config.json"
    fields: dict[str, Any] = dict(load_object(path, kind="target"))
    facts = read_json(folder / QUANT_CONFIG)["quantization"]
    excluded = sorted(set(facts.get("exclude_modules") or ()) | {"lm_head"})
    inline = fields.get("quantization_config") or {}
    fields["quantization_config"] = {**inline, "quant_method": "modelopt", **facts, "exclude_modules": excluded}
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def modelopt_configuration(format: Format, *, kv_cache: bool = False) -> dict[str, Any]:
    """ModelOpt's default configuration of a format; `kv_cache` adds FP8 K/V."""
    mtq = import_extra("engines", "modelopt.torch.quantization")
    config: dict[str, Any] = copy.deepcopy(mtq.FP8_DEFAULT_CFG if format == "fp8" else mtq.NVFP4_DEFAULT_CFG)
    if format == "nvfp4":
        _register()
        for entry in config["quant_cfg"]:
            if isinstance(entry.get("cfg"), dict) and entry["cfg"].get("num_bits") == (2, 1):
                entry["cfg"]["backend"] = BACKEND
    if kv_cache:
        config["quant_cfg"] += [e for e in mtq.FP8_KV_CFG["quant_cfg"] if "bmm" in e.get("quantizer_name", "")]
    return config


def _register() -> None:
    def encode_and_decode(x: Tensor, quantizer: Any) -> Tensor:
        return quantize(x.reshape(-1, x.shape[-1]), "nvfp4").dequantize(x.dtype).view(x.shape)

    quantizers = import_extra("engines", "modelopt.torch.quantization.nn.modules.tensor_quantizer")
    with warnings.catch_warnings(action="ignore"):  # registering twice
        quantizers.register_quant_backend(BACKEND, encode_and_decode)


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, from one file or from shards."""
    index = folder / INDEX
    files = set(read_json(index)["weight_map"].values()) if index.is_file() else {SINGLE}
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


def decoded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain fp32 weights of a ModelOpt checkpoint; scales are used up, K/V scales left out."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        scale = tensors.get(f"{module}.weight_scale")
        if leaf == "weight" and scale is not None:
            format: Format = "fp8" if tensor.dtype == torch.float8_e4m3fn else "nvfp4"
            plain[name] = QuantizedTensor(format, tensor, scale, tensors.get(f"{module}.weight_scale_2")).dequantize()
        elif leaf not in (*SCALES, "k_scale", "v_scale"):
            plain[name] = tensor.float()
    return plain


def compare(source: Mapping[str, Tensor], written: Mapping[str, Tensor], bound: float) -> Measured:
    """Relative error of every tensor, and the worst; tied heads that one side leaves out do not count.

    Raises:
        UserError: a tensor is lost, or farther away than `bound`.
    """
    lost = sorted(source.keys() - written.keys() - {"lm_head.weight"})
    if lost:
        raise UserError(f"tensor {lost[0]} was lost (and {len(lost) - 1} more)", where="quantised checkpoint")
    errors = {name: relative_error(source[name], written[name]) for name in sorted(source.keys() & written.keys())}
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > bound:
        what = f"tensor {worst} is {errors[worst]:.3f} away from its source, more than {bound}"
        raise UserError(what, where="quantised checkpoint", do="report this: its scales were written wrongly")
    rounded = {name: round(error, 6) for name, error in errors.items()}
    return {"worst_tensor": worst, "worst_error": rounded[worst], "errors": rounded}

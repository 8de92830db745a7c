"""Target and drafter in FP8 or NVFP4, by ModelOpt on a CPU, each read back and compared with its source.

The target keeps Hugging Face's form and is calibrated on its own answers. The drafter keeps z-lab's layout, with
ModelOpt's tensors: ModelOpt's own exporter of DFlash drafters names excluded modules after its training wrapper
("dflash_module.fc", "model*"), and `model*` would exclude every layer of an engine that calls them `model.layers.*`.
Here they carry the engines' names.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import DIALECTS
from dflash_serve.checkpoint.formats import FP4_MAX, FP8_MAX, GROUP, Format, dequantized, quantize
from dflash_serve.checkpoint.quantization import QUANT_CONFIG
from dflash_serve.checkpoint.reader import load_tensors, load_weights, open_checkpoint
from dflash_serve.common.extras import import_extra

from .calibration import read_answers, read_ranges
from .compare import BOUNDS, compare, decoded, read_checkpoint
from .pipeline import Measured, Work

EXCLUDED = ("fc", "lm_head", "embed_tokens", "model.embed_tokens")
"""fc makes the context feature of every layer at once: its error would be in all of them."""
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""Files of the target that are copied as they are."""
BACKEND = "dflash_cpu_nvfp4"
"""Our NVFP4 in ModelOpt's registry: its own is a CUDA kernel."""


def quantize_drafter(work: Work, format: Format) -> Measured:
    """Steps `drafter-fp8` and `drafter-nvfp4`: the quantised drafter, and how far each tensor is from its source."""
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
        mtq = import_extra("engines", "modelopt.torch.quantization")
        utils = import_extra("engines", "modelopt.torch.export.quant_utils")
        root = _skeleton(tensors)
        mtq.quantize(root, modelopt_configuration(format))
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
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        out, inner = tensors[name].shape
        linear = nn.Linear(inner, out, bias=False, dtype=torch.bfloat16)
        linear.weight.data = tensors[name].to(torch.bfloat16)
        parent.add_module(leaf, linear)
    return root


def _config_files(config: DrafterConfig, format: Format) -> dict[str, dict[str, object]]:
    """config.json and hf_quant_config.json: the same facts in the two forms that engines look for."""
    producer = {"name": "modelopt", "version": import_extra("engines", "modelopt").__version__}
    facts: dict[str, object] = {
        "quant_algo": format.upper(),
        "kv_cache_quant_algo": None,
        "exclude_modules": list(EXCLUDED),
    }
    if format == "nvfp4":
        facts["group_size"] = GROUP
    inline = {"quant_method": "modelopt", "producer": producer, **facts, "ignore": list(EXCLUDED)}
    fields = DIALECTS["zlab"].write(config, None)
    return {
        "config.json": {**fields, "dtype": "bfloat16", "torch_dtype": "bfloat16", "quantization_config": inline},
        QUANT_CONFIG: {"producer": producer, "quantization": facts},
    }


def quantize_target(work: Work, format: Format) -> Measured:
    """Steps `target-fp8` and `target-nvfp4`: the quantised target, and how far each tensor is from its source."""
    with quietly():
        export = import_extra("engines", "modelopt.torch.export")
        model = quantized_model(work, format)
        export.export_hf_checkpoint(model, export_dir=work.folder)
    for name in CARRIED:
        if (work.inputs["target"] / name).is_file():
            (work.folder / name).write_bytes((work.inputs["target"] / name).read_bytes())
    _name_modules_as_engines_do(work.folder)
    # Compared with what was quantised: the source in bf16.
    source = {name: t.to(torch.bfloat16).float() for name, t in read_checkpoint(work.inputs["target"]).items()}
    measured = compare(source, decoded(read_checkpoint(work.folder)), BOUNDS[format])
    size = sum(path.stat().st_size for path in work.folder.glob("*.safetensors"))
    return {**measured, "bytes": size, "bytes_of_source_in_bf16": sum(2 * t.numel() for t in source.values())}


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
        model, modelopt_configuration(format, kv_cache=format == "fp8"), calibrate
    )


def _name_modules_as_engines_do(folder: Path) -> None:
    """Makes config.json say what hf_quant_config.json says, under the names that engines give the modules."""
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    facts = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
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
    quantizers = import_extra("engines", "modelopt.torch.quantization.nn.modules.tensor_quantizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # registering twice
        quantizers.register_quant_backend(BACKEND, _fake_quantize)


def _fake_quantize(x: Tensor, quantizer: Any) -> Tensor:
    """Encodes x to NVFP4 and decodes it again: what the calibration's later layers see."""
    rows = x.reshape(-1, x.shape[-1])
    return quantize(rows, "nvfp4").dequantize(x.dtype).view(x.shape)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silences ModelOpt, transformers and the exporter inside, but for errors."""
    logs = import_extra("engines", "transformers").utils.logging
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield

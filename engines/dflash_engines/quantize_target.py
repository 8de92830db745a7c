"""The target in FP8 (weights, activations, K/V) or NVFP4, in Hugging Face form, calibrated on its own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dflash_serve.checkpoint.formats import Format

from .calibration import read_answers
from .compare import BOUNDS, compare, decoded, read_checkpoint
from .environment import need
from .modelopt import configuration, quietly
from .step import Measured, Work

CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def quantize_target(work: Work, format: Format) -> Measured:
    """Step `target-fp8` and `target-nvfp4`."""
    with quietly():
        export = need("modelopt.torch.export")
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

    return need("modelopt.torch.quantization").quantize(
        model, configuration(format, kv_cache=format == "fp8"), calibrate
    )


def _name_modules_as_engines_do(folder: Path) -> None:
    """config.json says the same as hf_quant_config.json, under the names engines give the modules."""
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    facts = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
    excluded = sorted(set(facts.get("exclude_modules") or ()) | {"lm_head"})
    inline = fields.get("quantization_config") or {}
    fields["quantization_config"] = {**inline, "quant_method": "modelopt", **facts, "exclude_modules": excluded}
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

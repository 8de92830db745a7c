"""Quantised drafters on SGLang 0.5.23: the table of layouts that its drafts load (tests/contract/test_layouts.py).

`models/dflash.py` gives every product of a decoder layer its quantisation, and no name of a layer: one rule holds for
all layers. `fc`, convolutions and heads are dense. Context K/V of quantised q/k/v are made by the whole product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dflash_serve.adapter.draft_layouts import (
    DEQUANTISE,
    SERVED,
    Grid,
    Layouts,
    after_convert,
    input_scale_problems,
    layers_differ,
    layout_problems,
    slice_problems,
    turned_problems,
)
from dflash_serve.checkpoint.config import SLIDING
from dflash_serve.checkpoint.files import IN_CONFIG, read_object
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.storage import Format, Scheme
from dflash_serve.errors import Problem

from .facts import FACTS

LAYOUTS: Layouts = {
    ("compressed-tensors", "int8"): SERVED,
    ("compressed-tensors", "w8a16"): SERVED,
    ("compressed-tensors", "w4a16"): SERVED,
    ("compressed-tensors", "fp8"): SERVED,
    ("compressed-tensors", "fp8-block"): SERVED,
    ("compressed-tensors", "nvfp4"): SERVED,
    ("compressed-tensors", "mxfp4"): after_convert("SGLang has no MXFP4 product but of experts"),
    ("compressed-tensors", "mxfp8"): after_convert("SGLang has no MXFP8 product of compressed-tensors"),
    ("modelopt", "fp8"): SERVED,
    ("modelopt", "fp8-block"): after_convert("SGLang does not know ModelOpt's FP8_PB_WO for a whole drafter"),
    ("modelopt", "nvfp4"): SERVED,
    ("modelopt", "mxfp8"): after_convert(
        "SGLang reads MXFP8's scales as weight_scale_inv, leaves ModelOpt's weight_scale out, and every product is 0"
    ),
    ("modelopt", "mixed"): after_convert(
        "SGLang's drafts find no layer of MIXED_PRECISION's list: their layers have no names"
    ),
    ("fp8", "fp8"): SERVED,
    ("fp8", "fp8-block"): SERVED,
    ("gptq", "w4a16"): SERVED,
    ("gptq", "w8a16"): SERVED,
    ("awq", "w4a16"): SERVED,
}
METHODS: Mapping[str, str] = {
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "gptq": "gptq_marlin",
    "awq": "awq_marlin",
}
MODELOPT: Mapping[Format, str] = {"fp8": "modelopt_fp8", "nvfp4": "modelopt_fp4"}
MARLIN: Mapping[Format, Grid] = {"w4a16": Grid(64, 128), "w8a16": Grid(64, 128)}
"""Tiles of the one kernel that SGLang has for these (`verify_marlin_supports_shape`), whose answer it does not heed."""
UNQUANTISED = "unquant"
WEIGHTS_ALONE, AUX_IDS = "W4A16_NVFP4", "eagle_aux_hidden_state_layer_ids"
"""By which SGLang knows NVIDIA's drafters of Nemotron 3.5: a value of `quant_algo`, and a key of config.json."""


def method_of(checkpoint: Checkpoint | None) -> str:
    """SGLang's value of --speculative-draft-model-quantization; it must be given, or a draft inherits the target's."""
    quantization = checkpoint.quantization if checkpoint else None
    if quantization is None:
        return UNQUANTISED
    return MODELOPT[quantization.format] if quantization.layout == "modelopt" else METHODS[quantization.layout]


def is_known_as_published(checkpoint: Checkpoint | None) -> bool:
    """SGLang has code for this very form: NVIDIA's drafters of Nemotron 3.5 (`is_nemotron_35_draft_config`).

    It then takes their copy of the embedding, and `fc` and the Markov head as they are quantised, and hands out the
    target's features in the order of its layers. It needs windows and causality in z-lab's keys.
    """
    if checkpoint is None or checkpoint.config is None or checkpoint.quantization is None:
        return False
    config, raw = checkpoint.config, read_object(checkpoint.folder / "config.json", []) or {}
    section, declared, ids = raw.get("dflash_config"), raw.get(IN_CONFIG), list(config.target_layer_ids)
    inner, named = section if isinstance(section, dict) else {}, raw.get("architectures")
    sliding = [kind == SLIDING for kind in types] if isinstance(types := raw.get("layer_types"), list) else []
    signs = (
        isinstance(declared, dict) and declared.get("quant_algo") == WEIGHTS_ALONE,
        (raw.get("has_embed_tokens"), raw.get("has_lm_head") or False) == (True, False),
        inner.get("sample_from_anchor", raw.get("sample_from_anchor")) is False,
        raw.get(AUX_IDS) == [index + 1 for index in ids] and ids == sorted(set(ids)),
        isinstance(named, list) and any(one in named for one in ("DFlashDraftModel", "Qwen3DSparkModel")),
        sliding == [kind.window is not None for kind in config.layers] == [kind.causal for kind in config.layers],
        config.selector is None and config.convolution is None and config.slots == "fill-in",
    )
    return all(signs) and {one.layout for one in checkpoint.quantised.values()} == {"modelopt"}


def storage_problems(checkpoint: Checkpoint | None, devices: int, where: str) -> Iterator[Problem]:
    """Problems of how a drafter's weights are stored.

    Args:
        checkpoint: None = there is no drafter.
        devices: over which a product is split.
        where: the field or folder that names the drafter.
    """
    found = list(layout_problems(checkpoint, LAYOUTS, FACTS.title, where))
    yield from found
    if found or checkpoint is None or checkpoint.quantization is None:
        return
    yield from layers_differ(checkpoint, FACTS.title, where)
    by_row = next((name for name, one in checkpoint.quantised.items() if _is_by_row(one)), None)
    if by_row is not None:
        what = f"{by_row} has an FP8 scale for each row, which SGLang reads in compressed-tensors' layout alone"
        yield Problem(what, where, "`dflash-serve convert --layout compressed-tensors` writes it")
    yield from input_scale_problems(checkpoint, FACTS.title, where)
    yield from turned_problems(checkpoint, FACTS.title, where)
    yield from slice_problems(checkpoint, devices, FACTS.title, MARLIN)
    if is_known_as_published(checkpoint):
        return
    dense = next((module for module in checkpoint.quantised if not module.startswith("layers.")), None)
    if dense is not None:
        yield Problem(f"{dense} is quantised, and SGLang's is dense", where, "`dflash-serve convert` writes it in bf16")
    packed = (one for one in checkpoint.quantised.values() if one.layout == "compressed-tensors")
    with_zeros = next((one for one in packed if one.bits == 8 and not one.symmetric), None)
    if with_zeros is not None:
        what = f"its {with_zeros.format.upper()} weights have zero points, which SGLang does not read"
        yield Problem(what, where, DEQUANTISE)


def _is_by_row(scheme: Scheme) -> bool:
    return scheme.layout == "modelopt" and scheme.strategy != "tensor"

"""Quantised drafters on vLLM 0.32-0.33: the table of layouts that they load (tests/contract/test_layouts.py).

`models/qwen3_dflash.py` quantises every product of a drafter, `fc` and convolutions too, by the drafter's own
configuration. Its list of spared modules must name them as vLLM does: fused products, layers counted behind the
target's (vllm#53116: drafts have no packed_modules_mapping). `prepare` writes such a list.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.adapter.draft_layouts import (
    DEQUANTISE,
    SERVED,
    Layouts,
    after_convert,
    input_scale_problems,
    layout_problems,
    slice_problems,
    turned_problems,
)
from dflash_serve.checkpoint.catalogue import EngineVerdict
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.errors import Problem

from .facts import FACTS

OTHER_SCALES = EngineVerdict(
    verdict="after convert",
    why="vLLM reads ModelOpt's FP8 by block with scales of four dimensions; "
    "`dflash-serve convert --layout compressed-tensors` writes what it loads",
)
LAYOUTS: Layouts = {
    ("compressed-tensors", "int8"): SERVED,
    ("compressed-tensors", "w8a16"): SERVED,
    ("compressed-tensors", "w4a16"): SERVED,
    ("compressed-tensors", "fp8"): SERVED,
    ("compressed-tensors", "fp8-block"): SERVED,
    ("compressed-tensors", "nvfp4"): SERVED,
    ("compressed-tensors", "mxfp4"): SERVED,
    ("compressed-tensors", "mxfp8"): SERVED,
    ("modelopt", "fp8"): SERVED,
    ("modelopt", "fp8-block"): OTHER_SCALES,
    ("modelopt", "nvfp4"): SERVED,
    ("modelopt", "mxfp8"): SERVED,
    ("modelopt", "mixed"): after_convert(
        "vLLM counts a drafter's layers behind the target's, and finds none of MIXED_PRECISION's list"
    ),
    ("fp8", "fp8"): SERVED,
    ("fp8", "fp8-block"): SERVED,
    ("gptq", "w4a16"): SERVED,
    ("gptq", "w8a16"): SERVED,
    ("awq", "w4a16"): SERVED,
}
ON_CPUS = {("compressed-tensors", "int8"), ("compressed-tensors", "fp8"), ("compressed-tensors", "w4a16")}
"""Layouts for which vLLM 0.32 has kernels on CPUs; that of W4A16 needs AVX-512, and multiplies in 16 bits alone.

FP8 with a scale of the tensor is rounded anew when it is loaded (`requantize_with_max_scale`), by an operator that
builds for CPUs declare and do not have: they load scales of rows alone.
"""


def storage_problems(
    checkpoint: Checkpoint | None, devices: int, where: str, *, dtype: str, on_cpu: bool
) -> Iterator[Problem]:
    """Problems of how a drafter's weights are stored.

    Args:
        checkpoint: None = there is no drafter.
        devices: over which a product is split.
        where: the field or folder that names the drafter.
        dtype: of the model's activations.
        on_cpu: vLLM runs on a CPU.
    """
    found = list(layout_problems(checkpoint, LAYOUTS, FACTS.title, where))
    yield from found
    if found or checkpoint is None or checkpoint.quantization is None:
        return
    if any(scheme.ordered for scheme in checkpoint.quantised.values()):
        what = "its columns are ordered by groups (desc_act, actorder: group), which vLLM reads no more"
        yield Problem(what, where, DEQUANTISE)
    yield from turned_problems(checkpoint, FACTS.title, where)
    yield from slice_problems(checkpoint, devices, FACTS.title)
    quantization = checkpoint.quantization
    of_tensor = quantization.format == "fp8" and any(one.strategy == "tensor" for one in checkpoint.quantised.values())
    if on_cpu and ((quantization.layout, quantization.format) not in ON_CPUS or of_tensor):
        what = f"vLLM has no kernel on CPUs for {quantization.words}" + (" with a scale of the tensor" * of_tensor)
        yield Problem(what, where, "use a GPU, or `dflash-serve convert --dequantise` it")
    elif dtype == "float32" and (quantization.layout != "compressed-tensors" or quantization.format == "w4a16"):
        what = f"vLLM runs {quantization.words} in bfloat16 and float16 only"
        yield Problem(what, "hardware.dtype", "use bfloat16, or `dflash-serve convert --dequantise` the drafter")
    yield from input_scale_problems(checkpoint, FACTS.title, where)
    head = next((module for module in checkpoint.quantised if module.startswith("markov_head.")), None)
    if head is not None:
        yield Problem(f"{head} is quantised, and vLLM's is dense", where, "`dflash-serve convert` writes it in bf16")

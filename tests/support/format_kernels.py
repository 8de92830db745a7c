"""Engines' own classes on GPTQ, AWQ, MXFP8 and mixed drafters: `python -m tests.support.format_kernels TARGET ...`.

It prints what `sglang_layouts` and `vllm_layouts` print, with stand-ins for the kernels that these formats have on
GPUs: each multiplies with the numbers that the tensors stand for as the engine loaded them. A folder named `published`
is given to the engine without our plug-in's checks, so that what it says of it is the engine's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from dflash_serve.checkpoint.formats import MX_BIAS
from dflash_serve.checkpoint.loading import StrictLoader
from dflash_serve.checkpoint.reader import open_checkpoint
from tests.support import sglang_kernels, sglang_layouts, vllm_kernels, vllm_layouts
from tests.support.draft_layouts import PUBLISHED
from tests.support.vllm_kernels import unpacked

AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ's `gemm`: number i of eight stands in this place of its word
DRAFT_PATH = "--speculative-draft-model-path"
CHECKS = {"sglang": "dflash_sglang.plugin.draft_problems", "vllm": "dflash_vllm.plugin.model.draft_problems"}


def _multiply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, layer.numbers.to(x.dtype), bias)


def _settle_gptq(self: Any, layer: Any) -> None:
    """Marlin's numbers: symmetric, whatever `qzeros` says; columns by `g_idx` where the recipe orders them."""
    bits = self.quant_config.weight_bits
    values, scale = unpacked(layer.qweight.data.t(), bits).float() - 2 ** (bits - 1), layer.scales.data.float().t()
    order = torch.arange(values.shape[1]) // (values.shape[1] // scale.shape[1])
    layer.numbers = values * scale[:, layer.g_idx.data.long() if self.quant_config.desc_act else order]


def _settle_awq(self: Any, layer: Any) -> None:
    whole = (unpacked(one.data, 4) for one in (layer.qweight, layer.qzeros))
    values, zeros = (one.unflatten(1, (-1, 8))[..., list(AWQ)].flatten(1).t() for one in whole)
    group = values.shape[1] // zeros.shape[1]
    scale = layer.scales.data.float().t().repeat_interleave(group, 1)
    layer.numbers = (values - zeros.repeat_interleave(group, 1)) * scale


def _settle_packed(self: Any, layer: Any) -> None:
    """compressed-tensors' whole numbers, with zero points or columns by `weight_g_idx`, where it has these."""
    bits = 32 // self.pack_factor
    values, scale = unpacked(layer.weight_packed.data, bits).float(), layer.weight_scale.data.float()
    zeros = getattr(layer, "weight_zero_point", None)
    order = torch.arange(values.shape[1]) // (values.shape[1] // scale.shape[1])
    order = layer.weight_g_idx.data.long() if self.has_g_idx else order
    less = torch.full_like(scale, 2 ** (bits - 1)) if zeros is None else unpacked(zeros.data.t(), bits).t()
    layer.numbers = (values - less[:, order]) * scale[:, order]


def _named(words: list[str], plain: Callable[[list[str]], Any]) -> Any:
    """SGLang's arguments with the draft's method, as `serve` gives it; none for a published folder."""
    from dflash_sglang.layouts import method_of

    draft, flag = Path(words[words.index(DRAFT_PATH) + 1]), "--speculative-draft-model-quantization"
    if flag in words:
        place = words.index(flag)
        own = [] if draft.name == PUBLISHED else [flag, method_of(open_checkpoint(draft))]
        words = [*words[:place], *own, *words[place + 2 :]]
    return plain(words)


def _for_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import server_args
    from sglang.srt.layers import quantization
    from sglang.srt.layers.quantization import fp8, marlin_utils
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.awq.schemes import AWQMarlinLinearScheme
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16
    from sglang.srt.layers.quantization.gptq.schemes import GPTQMarlinLinearScheme

    settle_fp8 = fp8.Fp8LinearMethod.process_weights_after_loading

    def mxfp8(self: Any, layer: Any) -> None:
        if not self.use_mxfp8:
            settle_fp8(self, layer)
            return
        scale = (layer.weight_scale_inv.data.float() - MX_BIAS).exp2()
        layer.numbers = layer.weight.data.float() * scale.repeat_interleave(32, 1)

    for scheme, settle in ((GPTQMarlinLinearScheme, _settle_gptq), (AWQMarlinLinearScheme, _settle_awq)):
        monkeypatch.setattr(scheme, "process_weights_after_loading", settle)
        monkeypatch.setattr(scheme, "apply_weights", _multiply)
        monkeypatch.setattr(scheme, "_init_kernel", lambda *_: type("Kernel", (), {})())
    monkeypatch.setattr(CompressedTensorsWNA16, "process_weights_after_loading", _settle_packed)
    prepare = server_args.prepare_server_args
    monkeypatch.setattr(server_args, "prepare_server_args", lambda words: _named(words, prepare))
    monkeypatch.setattr(fp8.Fp8LinearMethod, "process_weights_after_loading", mxfp8)
    for name in ("resolve_mxfp8_dense_gemm_backend", "dispatch_w8a8_mxfp8_linear"):
        monkeypatch.setattr(fp8, name, lambda: None)
    monkeypatch.setattr(awq, "_is_cuda", True)
    monkeypatch.setattr(marlin_utils, "get_device_capability", lambda *_: (9, 0))
    # Plain `gptq` is a method of SGLang on CPUs alone.
    for table in (quantization.QUANTIZATION_METHODS, quantization.BASE_QUANTIZATION_METHODS):
        monkeypatch.delitem(table, "gptq", raising=False)


def _for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.platforms.interface import PlatformEnum
    from vllm.scalar_type import scalar_types

    def of_gpus(has_zp: bool | None, include_fp_type: bool = True) -> list[Any]:
        found = [] if has_zp is False else [scalar_types.uint4]
        return found + ([] if has_zp else [scalar_types.uint4b8, scalar_types.uint8b128])

    monkeypatch.setattr(marlin_utils, "_query_cpu_marlin_supported_quant_types", of_gpus)
    monkeypatch.setitem(kernels._POSSIBLE_MXFP8_KERNELS, PlatformEnum.CPU, [EmulationMxfp8LinearKernel])


def main() -> None:
    """Loads every folder, as on Hopper."""
    engine, patch = "sglang" if find_spec("sglang") else "vllm", pytest.MonkeyPatch()
    variables = {"HF_HUB_OFFLINE": "1", "SGLANG_PLATFORM": "torch_cpu"}
    os.environ.update(variables if engine == "sglang" else vllm_layouts.ENVIRONMENT)
    if engine == "sglang":
        from sglang.srt.plugins import load_plugins
    else:
        from vllm.plugins import load_general_plugins as load_plugins

        torch.accelerator.empty_cache = lambda: None  # asks for an accelerator
    load_plugins()
    if engine == "sglang":
        sglang_kernels.install(patch)
        _for_sglang(patch)
    else:
        vllm_kernels.install(patch)
        _for_vllm(patch)
    made = sglang_layouts.made if engine == "sglang" else vllm_layouts.made
    target, *drafts = sys.argv[1:]
    began: list[bool] = []
    found: dict[str, Any] = {}
    for draft in drafts:
        with patch.context() as alone, torch.inference_mode(engine == "sglang"):
            if Path(draft).name == PUBLISHED:
                module, _, name = CHECKS[engine].rpartition(".")
                alone.setattr(import_module(module), name, lambda *_: [])
                alone.setattr(StrictLoader, "problems", lambda *_: ())
            found[draft] = made(target, Path(draft), began)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

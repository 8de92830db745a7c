"""ModelOpt on a CPU: its configurations, with a fake-quantiser for NVFP4 where it has a CUDA kernel."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dflash_serve.checkpoint.formats import Format, quantize

from .environment import need

BACKEND = "dflash_cpu_nvfp4"


def configuration(format: Format, *, kv_cache: bool = False) -> dict[str, Any]:
    """ModelOpt's default for a format; FP8 may quantise K/V as well."""
    mtq = need("modelopt.torch.quantization")
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
    quantizers = need("modelopt.torch.quantization.nn.modules.tensor_quantizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # registering twice
        quantizers.register_quant_backend(BACKEND, _fake_quantize)


def _fake_quantize(x: Tensor, quantizer: Any) -> Tensor:
    """x to NVFP4 and back: what the calibration's later layers see."""
    rows = x.reshape(-1, x.shape[-1])
    return quantize(rows, "nvfp4").dequantize(x.dtype).view(x.shape)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """ModelOpt, transformers and the exporter speak a lot: inside, only errors come through."""
    logs = need("transformers").utils.logging
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

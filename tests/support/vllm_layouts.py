"""vLLM's own class of drafters on a CPU: `python -m tests.support.vllm_layouts [--own-kernels] TARGET DRAFT ...`.

Prints one JSON object: draft folder -> what vLLM made of it. A process of its own, because vLLM keeps its groups of
processes and its platform for ever.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.draft_layouts import PLAIN, errors, relative
from tests.support.vllm_kernels import install

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def draft_class(target: str, draft: str, dtype: str) -> tuple[Any, Any]:
    """vLLM's own class of a draft with its weights, on a CPU, and its configuration; for drafts of the GPU runner."""
    from vllm.config import ModelConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils.network_utils import get_open_port

    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    config = EngineArgs(target, dtype=dtype, enforce_eager=True, **sizes).create_engine_config()
    own = ModelConfig(draft, dtype=dtype, enforce_eager=True, max_model_len=256)
    settings = {"draft_load_config": None, "enable_adaptive_verification": False}
    config.speculative_config = SimpleNamespace(draft_model_config=own, **settings)  # V2 wants a GPU
    with set_current_vllm_config(config), torch.device("cpu"):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        (architecture,) = own.architectures
        torch.set_default_dtype(getattr(torch, dtype))
        model = ModelRegistry._try_load_model_cls(architecture)(vllm_config=config)
        model.load_weights(DefaultModelLoader(config.load_config).get_all_weights(own, model))
    return model, own


def made(target: str, draft: Path, began: list[bool], dtype: str = "bfloat16") -> dict[str, Any]:
    """The quantisation method, relative errors of products and of context keys and values; or vLLM's own error."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.utils.network_utils import get_open_port

    speculative = {"method": "dflash", "model": str(draft), "num_speculative_tokens": 3}
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    try:
        given = EngineArgs(target, dtype=dtype, enforce_eager=True, speculative_config=speculative, **sizes)
        config = given.create_engine_config()
        with set_current_vllm_config(config):
            if not began:
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
                began.append(True)
            model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
            found = dict(errors(model.model, draft.parent / PLAIN))
            found["context"] = _context(model.model, draft.parent / PLAIN)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    down = model.model.layers[0].mlp.down_proj
    scheme = getattr(down, "scheme", None)
    method = type(down.quant_method if scheme is None else scheme).__name__
    return {"method": method, "fc": type(model.model.fc.quant_method).__name__, "errors": found}


def _context(model: Any, plain: Path) -> float:
    """The relative error of the context's keys and values, before their norm, against those of the plain numbers."""
    from safetensors.torch import load_file

    numbers, layers, dtype = load_file(plain), len(model.layers), model.hidden_norm.weight.dtype
    states = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    mean = states.float().pow(2).mean(dim=-1, keepdim=True)
    normed = (states.float() * torch.rsqrt(mean + model.config.rms_norm_eps)).to(dtype)
    normed = (normed * numbers["hidden_norm.weight"].to(dtype)).float()
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    model._hidden_norm_weight, ours = model.hidden_norm.weight.data, dict[str, Tensor]()
    if hasattr(torch.ops._C, "rms_norm"):
        keys, values = model._project_context_kv(states, len(states), layers, heads, size)
        ours = {"k": keys.flatten(2).float(), "v": values.flatten(2).float()}
    names = [f"layers.{index}.self_attn" for index in range(layers)]
    expected = {
        kind: torch.stack([normed @ numbers[f"{name}.{kind}_proj.weight"].T for name in names]) for kind in ours
    }
    return max((relative(ours[kind], expected[kind]) for kind in ours), default=0.0)


def main() -> None:
    """Loads every folder with the kernels of `vllm_kernels`, or with vLLM's own for CPUs, in float32."""
    os.environ.update(ENVIRONMENT)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    torch.accelerator.empty_cache = lambda: None  # asks for an accelerator
    own = "--own-kernels" in sys.argv
    target, *drafts = (word for word in sys.argv[1:] if word != "--own-kernels")
    if not own:
        install(pytest.MonkeyPatch())
    dtype, began = "float32" if own else "bfloat16", list[bool]()
    print(json.dumps({draft: made(target, Path(draft), began, dtype) for draft in drafts}))


if __name__ == "__main__":
    main()

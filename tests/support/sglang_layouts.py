"""SGLang's own class of drafters on a CPU: `python -m tests.support.sglang_layouts TARGET DRAFT ...`.

Prints one JSON object: draft folder -> what SGLang made of it. A process of its own, because SGLang keeps its groups of
processes and its platform for ever.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.draft_layouts import PLAIN, errors, relative
from tests.support.sglang_kernels import install


def made(target: str, draft: Path, began: list[bool]) -> dict[str, Any]:
    """The quantisation method, relative errors of products and of context keys and values; or SGLang's own error."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.network import get_open_port

    described = json.loads((draft / "config.json").read_text())
    markov = described.get("markov_rank")
    algorithm = "DSPARK" if markov else "DFLASH"
    drafting = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    drafting += ["--speculative-num-draft-tokens", "4"]
    if not began or "quantization_config" in described:  # a process understands the word once
        drafting += ["--speculative-draft-model-quantization", "unquant"]
    if markov:
        drafting += ["--speculative-dspark-block-size", "3", "--speculative-draft-attention-backend", "trtllm_mha"]
    device = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"]
    try:
        given = prepare_server_args(["--model-path", target, *device, *drafting])
        if not began:
            publish(given, role="scheduler")
            address = f"tcp://127.0.0.1:{get_open_port()}"
            init_distributed_environment(1, 0, address, 0, "gloo")
            initialize_model_parallel()
            began.append(True)
        config = ModelConfig.from_server_args(given, model_path=str(draft), is_draft_model=True)
        with get_parallel().override(tp_rank=0, attn_tp_rank=0):  # an embedding of its own asks for them
            model = DefaultModelLoader(LoadConfig()).load_model(model_config=config, device_config=DeviceConfig("cpu"))
        found = dict(errors(model, draft.parent / PLAIN))
        found["context"] = _context(model, draft.parent / PLAIN)
        found |= _outside(model, draft.parent / PLAIN)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    down = model.layers[0].mlp.down_proj
    scheme = getattr(down, "scheme", None)
    method = type(down.quant_method if scheme is None else scheme).__name__
    own = [name for name, _ in model.named_parameters() if "sink" in name or name.startswith("embed_tokens")]
    return {"method": method, "quantization": config.quantization, "errors": found, "own": own}


def _outside(model: Any, plain: Path) -> dict[str, float]:
    """Relative errors of `fc` and of the Markov head's second matrix, where the class takes them as they are stored."""
    from safetensors.torch import load_file

    numbers, found = load_file(plain), dict[str, float]()
    for name in ("fc", "markov_head.markov_w2") if model.is_nemotron_35_draft else ():
        if f"{name}.weight" in numbers:
            weight = numbers[f"{name}.weight"]
            given = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
            found[name] = relative(model.get_submodule(name)(given)[0].float(), given.float() @ weight.T)
    return found


def _context(model: Any, plain: Path) -> float:
    """The relative error of the context's keys and values, before their norm, against those of the plain numbers."""
    from safetensors.torch import load_file

    numbers, worst = load_file(plain), 0.0
    states = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for index, layer in enumerate(model.layers):
        for kind, ours in zip("kv", layer.self_attn.kv_proj_only(states), strict=True):
            expected = states.float() @ numbers[f"layers.{index}.self_attn.{kind}_proj.weight"].T
            worst = max(worst, relative(ours.float(), expected))
    return worst


@torch.inference_mode()
def main() -> None:
    """Loads every folder, as on Hopper."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "SGLANG_PLATFORM": "torch_cpu"})
    from sglang.srt.plugins import load_plugins

    load_plugins()
    install(pytest.MonkeyPatch())
    target, *drafts = sys.argv[1:]
    began: list[bool] = []
    print(json.dumps({draft: made(target, Path(draft), began) for draft in drafts}))


if __name__ == "__main__":
    main()

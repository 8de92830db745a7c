"""vLLM's own class of drafters with latent attention on a CPU: `python -m tests.support.vllm_latent TARGET DRAFT`.

Prints one JSON object: for each of the class's products and norms, whether it holds the numbers of the draft's file.
Its attention kernels, which only GPUs have, are left out: the class is built and loaded, and nothing is computed.
"""

from __future__ import annotations

import json
import os
import sys
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.vllm_layouts import ENVIRONMENT, draft_class


class NoAttention:
    """Attention of no kind: what `MultiHeadLatentAttention` asks for when it is built."""

    def __init__(self, **given: Any) -> None:
        self.dcp_world_size = 1


def expected(numbers: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """vLLM's parameters from the tensors of a K3DSparkModel."""
    outer = {name: one for name, one in numbers.items() if not name.startswith(("layers.", "embed_tokens."))}
    found = {f"model.{name}": tensor for name, tensor in outer.items()}
    rows = []
    for index in range(layers):
        layer = f"layers.{index}"
        own = {name.removeprefix(f"{layer}."): one for name, one in numbers.items() if name.startswith(f"{layer}.")}
        rows.append(own.pop("self_attn.kv_a_proj_with_mqa.weight"))
        own["self_attn.fused_qkv_a_proj.weight"] = torch.cat([own.pop("self_attn.q_a_proj.weight"), rows[-1]])
        parts = [own.pop(f"mlp.{part}_proj.weight") for part in ("gate", "up")]
        own["mlp.gate_up_proj.weight"] = torch.cat(parts)
        found |= {f"model.{layer}.{name}": tensor for name, tensor in own.items()}
    return {**found, "model.context_kv_proj.weight": torch.cat(rows)}


def main() -> None:
    """Builds the class of a draft with vLLM's own configuration and loader."""
    os.environ.update(ENVIRONMENT)
    from vllm.models.kimi_k3.nvidia import mla

    target, draft = sys.argv[1:]
    patch = pytest.MonkeyPatch()
    patch.setattr(mla, "get_attn_backend", lambda *_, **__: SimpleNamespace(get_impl_cls=lambda: NoAttention))
    patch.setattr(mla, "get_mla_prefill_backend", lambda _: NoAttention)
    model, own = draft_class(target, draft, "bfloat16")
    numbers, parameters = load_file(f"{draft}/model.safetensors"), dict(model.named_parameters())
    wanted = expected(numbers, own.hf_config.num_hidden_layers)
    # A vocabulary is padded to a multiple of 64.
    same = {name: name in parameters and torch.equal(parameters[name][: len(one)], one) for name, one in wanted.items()}
    rope = model.model.layers[0].self_attn.rotary_emb
    told: dict[str, Any] = {
        "class": type(model).__name__,
        "same": same,
        "others": sorted(parameters.keys() - wanted.keys()),
    }
    told |= {"scale": model.model.layers[0].self_attn.scale, "mscale": 0.1 * log(32) + 1}
    told["rope"] = [type(rope).__name__, rope.head_size, rope.is_neox_style]
    print(json.dumps(told))


if __name__ == "__main__":
    main()

"""The bundled drafter, broken in ways that vLLM 0.32.0 alone does not report: what it did with each, and what we say.

Measured with 12 prompts of 40 tokens, K = 7, float32 on a CPU; the sound drafter has an acceptance length of 2.513. All
answers stayed equal token for token: it costs speed, and nobody is told.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.source import BUNDLED_DRAFTER
from tests.support.tiny import edit_json

Tensors = dict[str, Tensor]
DEAD = "comes up healthy, and the first request ends the engine"


@dataclass(frozen=True)
class Fault:
    """One of them."""

    alone: float | str
    """vLLM's acceptance length without our plug-in, or what becomes of it."""
    says: str
    """Part of our line about it."""
    change: Mapping[str, object] = field(default_factory=dict)
    """Of config.json; `a.b` reaches into objects."""
    tensors: Callable[[Tensors], Tensors] | None = None


def without(part: str) -> Callable[[Tensors], Tensors]:
    """All but the tensors with this in their names."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


FAULTS: Mapping[str, Fault] = {
    "no fc.weight": Fault(1.000, "tensor fc.weight [576, 2880] is missing", tensors=without("fc.weight")),
    "no k_norm in layer 1": Fault(
        2.310, "tensor layers.1.self_attn.k_norm.weight [64] is missing", tensors=without("layers.1.self_attn.k_norm")
    ),
    "no layer 2": Fault(1.780, "tensor layers.2.", tensors=without("layers.2.")),
    "a bias too many": Fault(
        "ignored",
        "tensor layers.0.self_attn.q_proj.bias",
        tensors=lambda tensors: {**tensors, "layers.0.self_attn.q_proj.bias": torch.zeros(576, dtype=torch.bfloat16)},
    ),
    "a layer of memory that nobody wrote": Fault(
        2.513, "tensor layers.3.", {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    ),
    "a layer id beyond the target": Fault(
        DEAD, "name layer 35", {"dflash_config.target_layer_ids": [1, 8, 14, 20, 35]}
    ),
    "a mask token beyond the vocabulary": Fault(DEAD, "mask_token_id 60000", {"dflash_config.mask_token_id": 60000}),
    "a short RoPE table": Fault(2.129, "RoPE table has 128 positions", {"max_position_embeddings": 128}),
    "another vocabulary": Fault(2.513, "vocab_size is 49000, the target's is 49152", {"vocab_size": 49000}),
    "a shifted head": Fault(2.513, "anchor-first slots", {"dflash_config.shift_label": True}),
    "another head": Fault(2.513, "Domino head", {"dflash_config.projector_type": "domino"}),
}  # fmt: skip
"""Those that files give away. A wrong mask token (1.505), shifted layer ids (2.455) and a wrong rope_theta (2.429) they
do not: `doctor` finds them."""


def write_faulty(folder: Path, fault: Fault) -> Path:
    """The drafter with that fault."""
    shutil.copytree(BUNDLED_DRAFTER, folder)
    (folder / "provenance.json").unlink(missing_ok=True)
    edit_json(folder / "config.json", fault.change)
    if fault.tensors is not None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(fault.tensors(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""Other names for the same tensors are understood."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from dflash_serve.checkpoint.config import expected_tensors
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.models.loader import load_drafter
from tests.support.tiny import edit_json, random_tensors, tiny_drafter_config, write_tiny_drafter

CONFIG = tiny_drafter_config(attention_bias=True)
TENSORS = random_tensors(CONFIG)


def same(folder: Path) -> bool:
    state = load_drafter(folder).state_dict()
    return state.keys() == TENSORS.keys() and all(torch.equal(state[name], TENSORS[name]) for name in TENSORS)


def stored_as(tmp_path: Path, tensors: dict[str, Tensor], dialect: str = "zlab") -> Path:
    folder = write_tiny_drafter(tmp_path / "drafter", CONFIG, dialect=dialect)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_full_attention_drafter_of_l_layers_has_11_l_plus_3_tensors() -> None:
    assert len(expected_tensors(tiny_drafter_config())) == 11 * 2 + 3


def test_the_prefix_and_the_encoder_aliases(tmp_path: Path) -> None:
    other = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "model.encoder.output_norm_enc.weight"}
    assert same(stored_as(tmp_path, {other.get(name, f"model.{name}"): tensor for name, tensor in TENSORS.items()}))


def test_fused_projections_are_split(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    for layer in ("layers.0.", "layers.1."):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{layer}self_attn.{name}_proj.{kind}") for name in "qkv"]
            tensors[f"{layer}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        gate_up = [tensors.pop(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    assert same(stored_as(tmp_path, tensors))


def turned(tensors: Mapping[str, Tensor], name: str, inputs: Tensor, *, halves: bool) -> Tensor:
    """Heads after RoPE [heads, 16]: the first of every pair, then the second."""
    rows = (tensors[f"{name}_proj.weight"] @ inputs + tensors[f"{name}_proj.bias"]).unflatten(0, (-1, 16))
    rows = F.rms_norm(rows, (16,), tensors[f"{name}_norm.weight"])
    first, second = (rows.unflatten(-1, (2, -1)) if halves else rows.unflatten(-1, (-1, 2)).mT).unbind(-2)
    angle = 0.7 * torch.arange(1, 9)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


@pytest.mark.parametrize(("dialect", "key"), [("zlab", ""), ("speculators", "transformer_layer_config.")])
def test_heads_whose_neighbours_are_turned_are_read_for_rope_that_turns_halves(
    dialect: str, key: str, tmp_path: Path
) -> None:
    folder = stored_as(tmp_path, TENSORS, dialect)
    edit_json(folder / "config.json", {f"{key}rope_is_neox_style": False})
    read, inputs = load_tensors(open_checkpoint(folder)), torch.randn(32)
    for name in ("layers.0.self_attn.q", "layers.1.self_attn.k"):
        torch.testing.assert_close(turned(read, name, inputs, halves=True), turned(TENSORS, name, inputs, halves=False))
    others = [name for name in TENSORS if not any(part in name for part in (".q_", ".k_"))]
    assert all(torch.equal(read[name], TENSORS[name]) for name in others)


def test_rotary_buffers_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    assert same(stored_as(tmp_path, {**TENSORS, "rotary_emb.inv_freq": torch.ones(8)}))


def test_copies_of_the_verifiers_weights_are_skipped_in_speculators(tmp_path: Path) -> None:
    copies = {name: torch.ones(96, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    assert same(stored_as(tmp_path, {**TENSORS, **copies}, "speculators"))


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = stored_as(tmp_path, TENSORS)
    (folder / "model.safetensors").unlink()
    names, weight_map = list(TENSORS), {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: TENSORS[name] for name in part}, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(folder)


def test_dtype_and_gradients_are_what_was_asked_for(tmp_path: Path) -> None:
    drafter = load_drafter(stored_as(tmp_path, TENSORS), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    assert not drafter.training

"""Target and drafter of a plan, by their configurations; no weights are read.

Each is looked for in its folder, among what is on this machine already (the operator tables' library ships known
targets, the hub's cache has what was fetched), in the catalogue, and last on the hub: a plan needs no network for a
published drafter and its target.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.adapter.checks import block_problems, check_pairing
from dflash_serve.adapter.draft_layouts import product_formats, stored_bytes, with_pieces
from dflash_serve.adapter.launch import kv_bytes_each
from dflash_serve.checkpoint.catalogue import CataloguedDrafter, catalogued_drafter, catalogued_target
from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, Heads, uniform_target_layer_ids
from dflash_serve.checkpoint.reader import Checkpoint, read_config
from dflash_serve.checkpoint.source import cached_folder, target_described
from dflash_serve.checkpoint.target import TargetLayout, read_target_layout, target_configuration
from dflash_serve.checkpoint.target_files import KEYS, TargetFiles, read_target
from dflash_serve.common.settings import describe
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.planning.step_times import Pair, shipped_configuration

USUAL_LAYERS, USUAL_FEATURES, USUAL_BLOCK = 5, 5, 16
"""Shape of most published DFlash drafters (z-lab)."""
USUAL_KV_HEADS, USUAL_HEAD_DIM = 8, 128
"""Sizes that are assumed where the target has a latent cache (Kimi), and so no K/V heads of its own."""


def read_pair(deployment: Deployment) -> Pair:
    """Target and drafter of a deployment.

    Raises:
        UserError: one cannot be had, or they do not fit.
    """
    model = deployment.target
    folder, *told = _target_folder(model)
    layout = read_target_layout(folder, model)
    if layout.experts and not layout.experts_per_token:
        what = f"config.json names {layout.experts} experts, and not how many of them a token uses"
        raise UserError(what, where=model.model, do=f"add {KEYS['experts per token'][0]} to it")
    assumed, checkpoint = None, None
    if deployment.drafter is None:
        block = deployment.speculation.block_size or USUAL_BLOCK
        drafter = usual_drafter(layout, read_target(folder), block)
        assumed = f"no drafter was named: one of {USUAL_LAYERS} layers as wide as the target, B = {block}, is assumed"
    else:
        drafter, source, checkpoint = _named_drafter(deployment, layout, read_target(folder))
        raise_problems([*check_pairing(drafter, layout.shape), *block_problems(deployment, drafter)])
        told += [source] if source else []
    drafter = _as_served(drafter, deployment)
    share, each = deployment.kv_cache.memory_fraction, kv_bytes_each(deployment, layout)
    stored = None if checkpoint is None else stored_bytes(checkpoint, drafter)
    formats = product_formats(checkpoint) if checkpoint is not None else {}
    return Pair(model, folder, layout, drafter, assumed, each, share, tuple(told), stored, formats)


def _as_served(drafter: DrafterConfig, deployment: Deployment) -> DrafterConfig:
    # With the block and the windows of the deployment: a window bounds what is read, and not the K/V that are kept.
    speculation, layers = deployment.speculation, drafter.layers
    if (most := speculation.draft_window) is not None:
        layers = tuple(one.model_copy(update={"window": min(one.window or most, most)}) for one in layers)
    return drafter.model_copy(update={"block_size": speculation.block_size or drafter.block_size, "layers": layers})


def _target_folder(model: Model) -> tuple[Path] | tuple[Path, str]:
    # The folder of the target's configuration, and a sentence where it is the catalogue's.
    name = model.model
    here = None if Path(name).is_dir() else shipped_configuration(name) or cached_folder(name, model.revision)
    if here is not None:
        return (here,)
    known = None if Path(name).is_dir() or "/" not in name or model.revision else catalogued_target(name)
    if known is None or not known.has_sizes:
        return (target_configuration(model.model_copy(update={"model": str(target_described(name))})),)
    folder = Path(tempfile.mkdtemp(prefix="dflash-serve-plan-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(known.configuration))
    return folder, f"{name} is not on this machine: its sizes are the catalogue's ({known.source})"


def _named_drafter(
    deployment: Deployment, layout: TargetLayout, target: TargetFiles
) -> tuple[DrafterConfig, str | None, Checkpoint | None]:
    # The drafter's description, and a sentence where it is the catalogue's, else its checkpoint.
    model = deployment.drafter
    assert model is not None
    name, row = model.model, catalogued_drafter(model.model)
    here, block_size = cached_folder(name, model.revision), row.block_size if row else None
    if here is not None or row is None or Path(name).is_dir() or "/" not in name:
        block_size = block_size or deployment.speculation.block_size
        return _read(here or name, None if here else model.revision, block_size)
    if model.revision in (None, row.revision) and row.sizes and row.block_size and row.heads is not None:
        told = f"{name} is not on this machine: its sizes are the catalogue's ({row.source})"
        positions = (
            layout.shape.max_position_embeddings or DrafterConfig.model_fields["max_position_embeddings"].default
        )
        config = row.sizes.config(row.block_size, row.heads, layout.shape.num_layers)
        if row.weights not in (None, "bf16"):
            told += f". Its {row.weights} weights are counted as in bf16, which is too much"
        return config.model_copy(update={"max_position_embeddings": positions}), told, None
    try:
        return _read(name, model.revision, block_size)
    except UserError as error:
        if row.block_size is None:
            raise
        told = f"{name} cannot be read ({error.what}), and the catalogue has no sizes of it"
        told += f": {USUAL_LAYERS} layers as wide as the target are assumed"
        return _of_row(usual_drafter(layout, target, row.block_size), row), told, None


def _read(
    folder_or_id: str | Path, revision: str | None, block_size: int | None
) -> tuple[DrafterConfig, None, Checkpoint]:
    config, checkpoint = read_config(folder_or_id, revision, block_size=block_size)
    return config, None, with_pieces(checkpoint)


def _of_row(usual: DrafterConfig, row: CataloguedDrafter) -> DrafterConfig:
    # A drafter of the usual shape with the heads of a row.
    return usual.model_copy(update=(row.heads or Heads()).parts)


def usual_drafter(layout: TargetLayout, target: TargetFiles, block_size: int) -> DrafterConfig:
    """A drafter of the usual shape for this target.

    Raises:
        UserError: the target's sizes fit no drafter.
    """
    shape, wide = layout.shape, target.model.get("intermediate_size")
    try:
        return DrafterConfig(
            block_size=block_size,
            target_layer_ids=uniform_target_layer_ids(shape.num_layers, USUAL_FEATURES),
            mask_token_id=0,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=wide if isinstance(wide, int) and not layout.experts else 3 * shape.hidden_size,
            num_attention_heads=layout.attention_heads,
            num_key_value_heads=USUAL_KV_HEADS if layout.latent else layout.kv_heads,
            head_dim=USUAL_HEAD_DIM if layout.latent else layout.head_dim,
            layers=(AttentionKind(),) * USUAL_LAYERS,
        )
    except ValidationError as error:
        what = f"no drafter has the sizes of this target ({describe(error)})"
        raise UserError(what, where=shape.name, do="correct its config.json, or name --drafter") from None

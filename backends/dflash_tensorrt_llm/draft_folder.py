"""The drafter as TensorRT-LLM reads it: z-lab's layout, `block_size` at top level, plain names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.files import IN_CONFIG, INDEX, QUANT_CONFIG, SINGLE
from dflash_serve.checkpoint.reader import DIALECTS, HINT, Checkpoint, open_checkpoint, read_tensors
from dflash_serve.common.files import whole_folder
from dflash_serve.deployment import Model
from dflash_serve.errors import Problem, UserError, raise_problems

NEUTRAL = "dflash_serve.json"
"""Our own description beside config.json: z-lab's dialect cannot say everything, and the plug-in reads this."""


def write_draft_folder(model: Model, config: DrafterConfig, folder: Path, *, of_upstream: bool) -> None:
    """Writes config.json and links the weights, whole or not at all; weights are copied only to rename them.

    Args:
        of_upstream: TensorRT-LLM's own drafter reads it, with two-sided windows in its own words.

    Raises:
        UserError: the drafter cannot be fetched or has problems, or the folder is not ours to replace.
    """
    checkpoint = open_checkpoint(model.model, model.revision)
    raise_problems(checkpoint.problems, hint=HINT)
    if folder.exists() and not (folder / NEUTRAL).is_file():
        raise UserError("is there already, and not written by us", where=str(folder), do="give another folder")
    fields = {**_config_json(config, checkpoint), **(_two_sided(config) if of_upstream else {})}
    with whole_folder(folder) as scratch:
        (scratch / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        (scratch / NEUTRAL).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        _link(scratch, {checkpoint.folder / QUANT_CONFIG})
        if _has_plain_names(checkpoint):
            _link(scratch, {checkpoint.folder / INDEX, *(header.file for header in checkpoint.headers.values())})
        else:
            _write_weights(checkpoint, scratch / SINGLE)


def _config_json(config: DrafterConfig, checkpoint: Checkpoint) -> dict[str, object]:
    """z-lab's form of the config; what it has no words for stays in the neutral file, for the plug-in."""
    kinds = {kind.causal for kind in config.layers if kind.window is not None}
    if not kinds <= {True}:
        layers = tuple(kind.model_copy(update={"causal": kind.window is not None}) for kind in config.layers)
        config = config.model_copy(update={"layers": layers})
    fields = DIALECTS["zlab"].write(config, None)
    original = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    if IN_CONFIG in original:
        fields[IN_CONFIG] = original[IN_CONFIG]
    dtype = "float32" if {header.dtype for header in checkpoint.headers.values()} == {"F32"} else "bfloat16"
    return {**fields, "dtype": dtype, "torch_dtype": dtype}


def _two_sided(config: DrafterConfig) -> dict[str, object]:
    """Windows that see the slots behind them as TensorRT-LLM 1.4 calls them: `use_swa`, and no `sliding_window`."""
    windows = {kind.window for kind in config.layers if kind.window is not None and not kind.causal}
    if not windows:
        return {}
    dflash = DIALECTS["zlab"].write(config, None)["dflash_config"]
    assert isinstance(dflash, dict)
    swa = {"use_swa": True, "swa_window_size": windows.pop()}
    return {"use_sliding_window": False, "dflash_config": {**dflash, **swa}}


def _has_plain_names(checkpoint: Checkpoint) -> bool:  # TensorRT-LLM silently drops unknown names
    pieces = checkpoint.pieces
    return all(name in pieces and pieces[name].stored_name == name for name in checkpoint.headers)


def _link(folder: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())


def _write_weights(checkpoint: Checkpoint, path: Path) -> None:  # as stored, with scales
    from safetensors.torch import save_file

    problems: list[Problem] = []
    tensors = {name: tensor.clone() for name, tensor in read_tensors(checkpoint, problems)}
    raise_problems(problems, hint=HINT)
    save_file(tensors, path, metadata={"format": "pt"})

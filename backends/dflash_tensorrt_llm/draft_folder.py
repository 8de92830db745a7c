"""The drafter as TensorRT-LLM reads it: z-lab's layout, `block_size` at top level, plain names."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.checkpoint.dialects import DIALECTS, Target
from dflash_serve.checkpoint.headers import INDEX, SINGLE, Header, read_headers
from dflash_serve.checkpoint.quantization import QUANT_CONFIG
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.source import drafter_source, local_folder
from dflash_serve.checkpoint.tensors import SCALES, expected_tensors
from dflash_serve.deployment import Model
from dflash_serve.errors import Problem, UserError, raise_problems

if TYPE_CHECKING:
    from torch import Tensor

NEUTRAL = "dflash_serve.json"
"""Our own description beside config.json: z-lab's dialect cannot say everything, and the plug-in reads this."""


def write_draft_folder(model: Model, config: DrafterConfig, folder: Path) -> None:
    """Writes config.json and links the weights, whole or not at all; weights are copied only to rename them.

    Raises:
        UserError: the drafter cannot be fetched, its headers are broken, or the folder is not ours to replace.
    """
    source = local_folder(drafter_source(model.model), model.revision)
    problems: list[Problem] = []
    headers = read_headers(source, problems)
    raise_problems(problems, hint="`dflash-serve inspect` shows all")
    if folder.exists() and not (folder / NEUTRAL).is_file():
        raise UserError("is there already, and not written by us", where=str(folder), do="give another folder")
    scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    scratch.mkdir(parents=True)
    try:
        fields = _config_json(config, source, sorted({header.dtype for header in headers.values()}))
        (scratch / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        (scratch / NEUTRAL).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if _has_plain_names(headers, config):
            _link_weights(source, headers, scratch)
        else:
            _write_tensors(scratch / SINGLE, load_tensors(open_checkpoint(source)))
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _config_json(config: DrafterConfig, source: Path, dtypes: list[str]) -> dict[str, object]:
    """z-lab's form of the config; what it has no words for stays in the neutral file, for the plug-in."""
    kinds = {kind.causal for kind in config.layers if kind.window is not None}
    plain = config if kinds <= {True} else config.model_copy(update={"layers": _sliding_causal(config)})
    fields = DIALECTS["zlab"].write(plain, Target())
    original = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in original:
        fields["quantization_config"] = original["quantization_config"]
    dtype = "float32" if dtypes == ["F32"] else "bfloat16"
    return {**fields, "dtype": dtype, "torch_dtype": dtype}


def _sliding_causal(config: DrafterConfig) -> tuple[AttentionKind, ...]:
    return tuple(kind.model_copy(update={"causal": kind.window is not None}) for kind in config.layers)


def _link_weights(source: Path, headers: Mapping[str, Header], folder: Path) -> None:
    links = {header.file for header in headers.values()}
    links |= {path for path in (source / INDEX, source / QUANT_CONFIG) if path.is_file()}
    for path in sorted(links):
        (folder / path.name).symlink_to(path.resolve())


def _has_plain_names(headers: Mapping[str, Header], config: DrafterConfig) -> bool:
    """Whether every tensor has z-lab's name: TensorRT-LLM's loader drops names it does not know in silence."""
    expected = expected_tensors(config)
    return all(name in expected or name.rsplit(".", 1)[-1] in SCALES for name in headers)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})

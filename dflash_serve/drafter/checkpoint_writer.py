"""Writes a drafter in any dialect: whole or not at all."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_serve.drafter.config import DrafterConfig
from dflash_serve.drafter.dialects import DIALECTS, Target
from dflash_serve.drafter.headers import SINGLE
from dflash_serve.drafter.tensor_names import expected_tensors
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_serve.drafter.model import Drafter


def save_drafter(drafter: Drafter, folder: str | Path, *, dialect: str = "zlab", overwrite: bool = False) -> None:
    """Writes a drafter as it is in memory; see `write_drafter`."""
    write_drafter(folder, drafter.config, drafter.state_dict(), dialect=dialect, overwrite=overwrite)


def write_drafter(
    folder: str | Path,
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    dialect: str = "zlab",
    target: Target | None = None,
    overwrite: bool = False,
) -> None:
    """Writes config.json and model.safetensors, first into a folder beside `folder`, which then takes its name.

    Args:
        folder: the destination; must not exist, be empty, or be given up by `overwrite`.
        config: what the drafter is.
        tensors: by our names, in the dtypes they are to be stored in.
        dialect: `zlab` (SGLang, TensorRT-LLM, vLLM and z-lab's code read it), `speculators` or `modelopt`.
        target: what is known of the target, for the dialects that name it.
        overwrite: replace what is there.

    Raises:
        UserError: the destination is taken, or the dialect cannot express this drafter.
        ValueError: the tensors are not those of `config`.
    """
    folder = Path(folder).resolve()
    if dialect not in DIALECTS:
        raise UserError(f"no dialect {dialect!r}", where="--to", do=f"there are: {', '.join(DIALECTS)}")
    fields = DIALECTS[dialect].write(config, target or Target())
    _check_tensors(config, tensors)
    _check_destination(folder, overwrite)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    text = json.dumps({**fields, "dtype": dtype, "torch_dtype": dtype}, indent=2, sort_keys=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        scratch.mkdir()
        (scratch / "config.json").write_text(text + "\n", encoding="utf-8")
        _write_tensors(scratch / SINGLE, tensors)
        _take_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    expected = expected_tensors(config)
    have = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if have != expected:
        wrong = sorted(name for name in have.keys() | expected.keys() if have.get(name) != expected.get(name))
        raise ValueError(f"these tensors are not those of the config: {', '.join(wrong)}")


def _check_destination(folder: Path, overwrite: bool) -> None:
    """Only what is nothing, empty, or given up and visibly a checkpoint may be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise UserError("the destination is a file", where=str(folder), do="give another")
    if not overwrite:
        raise UserError("the destination is not empty", where=str(folder), do="give another, or --overwrite")
    if not (folder / "config.json").is_file():
        raise UserError("the destination is no checkpoint: it has no config.json", where=str(folder), do="give another")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    # Cloned: rows of one fused or memory-mapped storage cannot be saved as they are.
    save_file(
        {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )


def _take_place(scratch: Path, folder: Path) -> None:
    """Renames; what was there before is moved aside first and deleted last, so that it survives a failure."""
    if not folder.exists():
        scratch.rename(folder)
        return
    old = scratch.with_name(f"{scratch.name}.old")
    folder.rename(old)
    try:
        scratch.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)

"""Writes a drafter in any dialect. The folder appears complete or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.declaring import declarations
from dflash_serve.checkpoint.files import SINGLE
from dflash_serve.checkpoint.reader import DIALECTS
from dflash_serve.checkpoint.storage import OPTIONAL, Scheme
from dflash_serve.checkpoint.tensors import stored_tensors
from dflash_serve.common.files import whole_folder
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def write_drafter(
    folder: str | Path,
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    dialect: str = "zlab",
    target: str | None = None,
    overwrite: bool = False,
    quantised: Mapping[str, Scheme] | None = None,
    behind: int | None = None,
    dry_run: bool = False,
) -> None:
    """Writes config.json and model.safetensors, first into a folder beside `folder`, which then takes its name.

    Args:
        folder: the destination: absent, an empty folder, or replaced with `overwrite`.
        config: the drafter.
        tensors: by our names, in the dtypes to store; of quantised modules those that their storage has.
        dialect: `zlab` (SGLang, TensorRT-LLM, vLLM and z-lab's code read it), or another of `DIALECTS`.
        target: hub id or folder of the target, for dialects that name it.
        overwrite: replace an existing checkpoint.
        quantised: our names of quantised modules -> their storage.
        behind: as for `declaring.declarations`.
        dry_run: check everything, also that something can be written there, and write nothing.

    Raises:
        UserError: the destination is taken or cannot be written, or the dialect cannot express this drafter.
        ValueError: the tensors are not those of `config`.
    """
    folder = Path(folder).resolve()
    if dialect not in DIALECTS:
        raise UserError(f"no dialect {dialect!r}", where="--to", do=f"there are: {', '.join(DIALECTS)}")
    fields = DIALECTS[dialect].write(config, target)
    quantised = quantised or {}
    _check_tensors(config, tensors, quantised)
    _check_destination(folder, overwrite)
    dtype = str(tensors["hidden_norm.weight"].dtype).removeprefix("torch.")
    added = {}
    if dialect == "speculators" and config.draft_vocabulary is not None:
        from dflash_serve.checkpoint.conversions import target_mask

        added["t2d"] = target_mask(tensors["d2t"], config.vocab_size)
    files = {"config.json": {**fields, "dtype": dtype, "torch_dtype": dtype}}
    for name, declared in declarations(config, quantised, behind).items():
        files[name] = {**files.get(name, {}), **declared}
    try:
        if dry_run:
            with TemporaryDirectory(dir=next(each for each in folder.parents if each.exists())):
                return
        with whole_folder(folder) as scratch:
            for name, content in files.items():
                text = json.dumps(content, indent=2, sort_keys=True)
                (scratch / name).write_text(text + "\n", encoding="utf-8")
            names = DIALECTS[dialect].names
            _write_tensors(scratch / SINGLE, {names.get(name, name): one for name, one in {**tensors, **added}.items()})
    except OSError as error:
        do = "give another destination"
        raise UserError(f"cannot be written ({error.strerror})", where=str(folder), do=do) from None


def fc_in_layer_order(tensors: Mapping[str, Tensor], layer_ids: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of a drafter for `config.in_layer_order`: columns of `fc` and of its scales by block are sorted.

    SGLang, vLLM and TensorRT-LLM hand out the outputs of target layers in the order of the layers, whatever a drafter
    lists. A layer that is listed twice is handed out once (`adapter.checks.layer_problems`).

    Args:
        tensors: by our names, quantised or not.
        layer_ids: `target_layer_ids`, in the order of the columns.
    """
    from torch import cat

    order, found = sorted(range(len(layer_ids)), key=lambda place: layer_ids[place]), dict(tensors)
    for name in ("fc.weight", "fc.weight_scale"):
        if name in found and found[name].dim() == 2 and order != sorted(order):
            parts = found[name].chunk(len(order), dim=1)
            found[name] = cat([parts[place] for place in order], dim=1)
    return found


def _check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], quantised: Mapping[str, Scheme]) -> None:
    expected = stored_tensors(config, quantised)
    optional = {name for name in expected if name.rpartition(".")[2] in OPTIONAL}
    unlike = {name for name, tensor in tensors.items() if name in expected and not expected[name].takes(tensor.shape)}
    if wrong := sorted(unlike | (tensors.keys() ^ expected.keys()) - optional):
        raise ValueError(f"these tensors are not those of the config: {', '.join(wrong)}")


def _check_destination(folder: Path, overwrite: bool) -> None:
    # With --overwrite, only a folder that is visibly a checkpoint is replaced.
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
    own = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save_file(own, path, metadata={"format": "pt"})

"""The catalogue's row of a drafter, made of its checkpoint: `python -m dflash_serve.catalogue_row FOLDER`.

It reads config.json and the headers of safetensors files; the files may be cut off behind their headers. What no file
tells is null in the row, and named on stderr: a person adds it, with its source.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

from dflash_serve.adapter.registry import backend, installed
from dflash_serve.adapter.verdicts import rule
from dflash_serve.checkpoint.catalogue import (
    CataloguedDrafter,
    DrafterSizes,
    Kind,
    catalogued_drafter,
    catalogued_target,
)
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.files import QUANT_CONFIG, load_object
from dflash_serve.checkpoint.reader import Checkpoint, open_checkpoint
from dflash_serve.common.documents import DATA, parse_json
from dflash_serve.errors import UserError

BY_HAND = ("revision", "licence", "gated", "thinking", "target_precision", "acceptance_length", "source")
"""Fields that no file of a checkpoint tells."""
DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
OTHER = "not known"  # Repository or target that was not named


def row(folder: Path, repository: str = OTHER, target: str = OTHER) -> tuple[CataloguedDrafter, list[str]]:
    """The row of the drafter in a folder, and the problems of its files.

    Args:
        folder: has config.json, and safetensors files or their headers.
        repository: hub id of the drafter.
        target: hub id of its target.

    Raises:
        UserError: no folder, or no config.json.
    """
    raw = load_object(folder / "config.json")
    with _whole(folder) as whole:
        published = catalogued_drafter(repository)
        checkpoint = open_checkpoint(whole, block_size=published.block_size if published else None)
    config = checkpoint.config
    problems = [problem.what for problem in checkpoint.problems]
    unread = problems[0] if config is None and problems else None
    heads = None if config is None else Heads.model_validate(config.parts)
    weights, known = _weights(folder, checkpoint, raw), catalogued_target(target)
    layout = checkpoint.quantization.layout if checkpoint.quantization else None
    family = known.family if known else None
    verdicts = {
        name: rule(backend(name), heads=heads, weights=weights, layout=layout, unread=unread, family=family)
        for name in installed()
    }
    found = CataloguedDrafter(
        repository=repository,
        target=target,
        kind=_kind(raw) if heads is None else heads.family,
        block_size=None if config is None else config.block_size,
        heads=heads,
        weights=weights,
        layout=layout,
        target_precision=None,
        thinking=None,
        revision=None,
        licence=None,
        gated=None,
        acceptance_length=(),
        source="",
        unread=unread,
        engines=verdicts,
        sizes=None if config is None else DrafterSizes.of(config),
    )
    return found, problems


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    # The folder, or a copy in which files that end behind their header have holes of the right length.
    short = {path: length for path in folder.glob("*.safetensors") if (length := _length(path)) > path.stat().st_size}
    if not short:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dflash-serve-row-") as scratch:
        for path in folder.iterdir():
            if path.suffix in (".json", ".safetensors") and path.is_file():
                shutil.copyfile(path, Path(scratch) / path.name)
        for path, length in short.items():
            os.truncate(Path(scratch) / path.name, length)
        yield Path(scratch)


def _length(path: Path) -> int:
    # Bytes that a safetensors file has when it is whole; 0 where its header cannot be read.
    try:
        with path.open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8))
            entries = parse_json(file.read(min(header, DATA.bytes)).decode("utf-8"), DATA, where=str(path))
        ends = (entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
        return int(8 + header + max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, UserError):
        return 0  # the reader says what is wrong with it


def _weights(folder: Path, checkpoint: Checkpoint, raw: object) -> str | None:
    # The declared quantisation, else the dtype of most weights.
    if checkpoint.quantization is not None:
        return checkpoint.quantization.format
    declared = raw.get("quantization_config") if isinstance(raw, dict) else None
    if isinstance(declared, dict) or (folder / QUANT_CONFIG).is_file():
        named = declared if isinstance(declared, dict) else {}
        return str(named.get("quant_algo") or named.get("format") or named.get("quant_method") or "quantised").lower()
    count = Counter[str]()
    for header in checkpoint.headers.values():
        count[header.dtype] += prod(header.shape)
    dtype = max(count, key=lambda one: count[one], default="")
    return DTYPES.get(dtype, dtype.lower() or None)


def _kind(raw: object) -> Kind:
    # Of a drafter that is not read, by the names in its config.json.
    text = json.dumps(raw).lower()
    kinds: tuple[Kind, ...] = ("DFlash2", "DSpark", "Domino")
    return next((kind for kind in kinds if kind.lower() in text), "DFlash")


def main() -> None:
    """Prints the row as JSON, and on stderr what a person must add and what is wrong with the files."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_serve.catalogue_row", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="Folder with config.json and safetensors files, or their headers.")
    parser.add_argument("--repository", default=OTHER, help="Hub id of the drafter.")
    parser.add_argument("--target", default=OTHER, help="Hub id of its target.")
    given = parser.parse_args()
    try:
        found, problems = row(given.folder, given.repository, given.target)
    except UserError as error:
        print(f"catalogue_row: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps(found.model_dump(mode="json"), indent=1, ensure_ascii=False))
    named = [name for name in ("repository", "target") if getattr(found, name) == OTHER]
    print(f"to be added by hand, with its source: {', '.join([*named, *BY_HAND])}", file=sys.stderr)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()

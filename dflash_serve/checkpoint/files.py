"""Reads a checkpoint's files without torch: JSON objects, and of safetensors the headers (names, shapes and dtypes)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.errors import Problem, first_line, raise_problems

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "download it again"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.bin")
LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors library's own limit."""


@dataclass(frozen=True)
class Header:
    """One tensor of one file."""

    file: Path
    dtype: str
    """safetensors' name: BF16, F32, F8_E4M3, I8, ..."""
    shape: tuple[int, ...]
    bytes: int
    start: int = 0
    """Offset of its data in the file."""


def read_object(path: Path, problems: list[Problem], *, kind: str = "drafter") -> Mapping[str, object] | None:
    """The object in a JSON file; None, and a problem added, where there is none.

    Args:
        path: the file.
        problems: added to.
        kind: what the file describes, for the messages: `drafter` or `target`.
    """
    again = f"download the {kind} again"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(Problem(f"no {path.name}", str(path.parent), f"give a {kind}'s folder"))
    except (ValueError, OSError) as error:
        problems.append(Problem(f"not valid JSON ({error})", str(path), again))
    else:
        if isinstance(raw, dict):
            return raw
        problems.append(Problem("not a JSON object", str(path), again))
    return None


def load_object(path: Path, *, kind: str = "drafter") -> Mapping[str, object]:
    """The object in a JSON file; `kind` as for `read_object`.

    Raises:
        UserError: there is none.
    """
    problems: list[Problem] = []
    found = read_object(path, problems, kind=kind)
    raise_problems(problems)
    assert found is not None
    return found


def read_headers(folder: Path, problems: list[Problem]) -> dict[str, Header]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json names.

    What is unreadable, truncated or absent is added to `problems`.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return _read_header(single, problems)
    if not index.is_file():
        pickled = next((name for name in PICKLES if (folder / name).is_file()), None)
        what = f"no {SINGLE}" + (f", only {pickled}, which is a pickle and never loaded" if pickled else "")
        problems.append(Problem(what, str(folder), "give a folder with safetensors weights"))
        return {}
    return _read_shards(index, problems)


def _read_shards(index: Path, problems: list[Problem]) -> dict[str, Header]:
    weight_map = _weight_map(index, problems)
    headers: dict[str, Header] = {}
    for name in sorted(set(weight_map.values())):
        shard = index.parent / name
        if Path(name).name != name or not shard.is_file():
            problems.append(Problem(f"shard {name!r} is missing", str(index), AGAIN))
            continue
        for tensor, header in _read_header(shard, problems).items():
            if tensor in headers:
                problems.append(Problem(f"tensor {tensor} is in two shards", str(index), AGAIN))
            headers[tensor] = header
    return headers


def _weight_map(index: Path, problems: list[Problem]) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        problems.append(Problem(f"no readable weight_map ({first_line(error)})", str(index), AGAIN))
        return {}


def _read_header(path: Path, problems: list[Problem]) -> dict[str, Header]:
    """The tensors of one safetensors file: 8 bytes of header length (little endian), JSON, data.

    (Format: github.com/huggingface/safetensors.) Offsets are checked against the file's size, so a download that broke
    off is found without reading it.
    """
    try:
        return _parse(path)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, struct.error) as error:
        problems.append(Problem(f"not a whole safetensors file ({first_line(error)})", str(path), AGAIN))
        return {}


def _parse(path: Path) -> dict[str, Header]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, LARGEST_HEADER):
            raise ValueError(f"its header claims {length} bytes, the file has {size}")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    headers, end = {}, 8 + length
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        shape = tuple(int(n) for n in entry["shape"])
        headers[name] = Header(path, str(entry["dtype"]), shape, stop - start, 8 + length + start)
        end = max(end, 8 + length + stop)
    if end != size:
        raise ValueError(f"its tensors need {end} bytes, the file has {size}")
    return headers

"""Files of a checkpoint folder, read without torch: JSON objects, safetensors headers, manifest.json.

The manifest lists every file that `dflash-serve build` wrote, with its digest and its origin. It is checked before the
folder is loaded.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.common.documents import CONFIG, DATA, is_regular, parse_json, read_json, read_text
from dflash_serve.common.files import sha256
from dflash_serve.common.settings import Frozen
from dflash_serve.errors import Problem, UserError, first_line, raise_problems

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "download it again"
PEEKED = 64  # bytes of a tokenizer's file that are looked at
QUANT_CONFIG = "hf_quant_config.json"
IN_CONFIG = "quantization_config"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.bin")
NOT_READ = ("consolidated", "adapter")
"""Parts of the names of weights that no reader takes for the model's: Mistral's second copy, and LoRA adapters."""
TOKENIZER = "tokenizer.json"
TOKENIZERS = (TOKENIZER, "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
"""Patterns of files, one of which every tokenizer has: fast, BPE, WordPiece, Mistral's, SentencePiece, tiktoken."""
PIECE = 1 << 24  # bytes of a tensor that are compared at once


@dataclass(frozen=True)
class Header:
    """One tensor of one file."""

    file: Path
    dtype: str  # safetensors' name: BF16, F32, F8_E4M3, I8, ...
    shape: tuple[int, ...]
    bytes: int
    start: int = 0  # offset of its data in the file


def read_object(path: Path, problems: list[Problem], *, kind: str = "drafter") -> Mapping[str, object] | None:
    """The object in a JSON file; None with a problem added if there is none.

    Args:
        path: the file.
        problems: added to.
        kind: `drafter` or `target`, for the messages.
    """
    again = f"download the {kind} again"
    if not os.path.lexists(path):
        problems.append(Problem(f"no {path.name}", str(path.parent), f"give a {kind}'s folder"))
        return None
    try:
        raw = read_json(path, CONFIG, do=again)
    except UserError as error:
        problems.append(error.problem())
    else:
        if isinstance(raw, dict):
            return raw
        problems.append(Problem("not a JSON object", str(path), again))
    return None


def load_object(path: Path, *, kind: str = "drafter") -> Mapping[str, object]:
    """The object in a JSON file, or an error; `kind` as for `read_object`.

    Raises:
        UserError: there is none.
    """
    problems: list[Problem] = []
    found = read_object(path, problems, kind=kind)
    raise_problems(problems)
    assert found is not None
    return found


def files_with(folder: Path, endings: Sequence[str], problems: list[Problem]) -> list[str]:
    """The shards with tensors of the first ending that there is, by the index in `folder`; else the single file."""
    stored = _weight_map(folder / INDEX, problems) if (folder / INDEX).is_file() else {}
    found = ({file for name, file in stored.items() if name.endswith(ending)} for ending in endings)
    return sorted(next(filter(None, found), {SINGLE}))


def read_headers(folder: Path, problems: list[Problem], *, only: Collection[str] | None = None) -> dict[str, Header]:
    """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json lists (`only`: of these).

    Unreadable, truncated and absent files are added to `problems`, and further files of weights: engines that read the
    index leave them out, TensorRT-LLM and transformers take them.
    """
    single, index = folder / SINGLE, folder / INDEX
    if os.path.lexists(index):
        return _read_shards(index, problems, only)
    if not os.path.lexists(single):
        pickled = next((name for name in PICKLES if (folder / name).is_file()), None)
        what = f"no {SINGLE}" + (f", only {pickled}, which is a pickle and never loaded" if pickled else "")
        problems.append(Problem(what, str(folder), "give a folder with safetensors weights"))
        return {}
    if only is None:
        _check_others(folder, {SINGLE}, problems)
    return _read_header(single, problems)


def _check_others(folder: Path, files: Collection[str], problems: list[Problem]) -> None:
    names = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in files)
    others = [name for name in names if not any(part in name for part in NOT_READ)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        what = f"{others[0]}{more} beside the weights is no part of them, and some engines would load it"
        problems.append(Problem(what, str(folder), "move it away, or download the model again"))


def _read_shards(index: Path, problems: list[Problem], only: Collection[str] | None) -> dict[str, Header]:
    weight_map = _weight_map(index, problems)
    headers: dict[str, Header] = {}
    files = set(weight_map.values())
    if only is None and files:
        _check_others(index.parent, files, problems)
    for name in sorted(name for name in files if only is None or name in only):
        shard = index.parent / name
        if Path(name).name != name or not os.path.lexists(shard):
            problems.append(Problem(f"shard {name!r} is missing", str(index), AGAIN))
            continue
        for tensor, header in _read_header(shard, problems).items():
            if tensor in headers:
                problems.append(Problem(f"tensor {tensor} is in two shards", str(index), AGAIN))
            headers[tensor] = header
    return headers


def _weight_map(index: Path, problems: list[Problem]) -> dict[str, str]:
    try:
        weight_map = read_json(index, do=AGAIN)["weight_map"]
        if not weight_map:
            raise TypeError("it is empty")
        return {str(name): str(file) for name, file in weight_map.items()}
    except UserError as error:
        problems.append(error.problem())
        return {}
    except (KeyError, TypeError, AttributeError) as error:
        problems.append(Problem(f"no readable weight_map ({first_line(error)})", str(index), AGAIN))
        return {}


def _read_header(path: Path, problems: list[Problem]) -> dict[str, Header]:
    # Format (github.com/huggingface/safetensors): 8 bytes of header length (little endian), JSON, data. Offsets are
    # checked against the file's size, so that an incomplete download is found without reading the data.
    try:
        return _parse(path)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, struct.error, UserError) as error:
        problems.append(Problem(f"not a whole safetensors file ({first_line(error)})", str(path), AGAIN))
        return {}


def _parse(path: Path) -> dict[str, Header]:
    if not is_regular(path):  # opening a pipe would wait for its writer
        raise ValueError("missing" if not path.exists() else "not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, DATA.bytes):
            raise ValueError(f"its header claims {length} bytes, the file has {size}")
        entries = parse_json(file.read(length).decode("utf-8"), DATA, where="its header")
    entries.pop("__metadata__", None)
    headers, end = {}, 8 + length
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop - start)):
            raise ValueError(f"tensor {name} has shape {list(shape)} and bytes {start} to {stop}")
        headers[name] = Header(path, str(entry["dtype"]), shape, stop - start, 8 + length + start)
        end = max(end, 8 + length + stop)
    if end != size:
        raise ValueError(f"its tensors need {end} bytes, the file has {size}")
    return headers


def tokenizer_problems(folder: Path) -> list[Problem]:
    """The problem of a folder without a tokenizer, from which transformers would make one of a few tokens."""
    found = [path for pattern in TOKENIZERS for path in folder.glob(pattern) if is_regular(path)]
    if not found:
        do = f"download {TOKENIZER} of the model again"
        return [Problem("no tokenizer: no file of one is there", str(folder), do)]
    if found[0].name == TOKENIZER:
        with found[0].open("rb") as file:
            beginning = file.read(PEEKED).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not beginning.startswith(b"{"):  # an interrupted download, or git-lfs's stand-in for the file
            return [Problem("not a JSON object", str(found[0]), AGAIN)]
    return []


def same_data(one: Header, other: Header) -> bool:
    """Two tensors are stored in the same bytes, dtype and shape."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = (min(PIECE, one.bytes - done) for done in range(0, one.bytes, PIECE))
        return all(first.read(size) == second.read(size) for size in sizes)


MANIFEST = "manifest.json"
DO = "build it again"


class FileEntry(Frozen):
    """One file."""

    sha256: str
    size: int


class Manifest(Frozen):
    """Contents and origin of a built folder."""

    step: str  # the build step that wrote it
    key: str  # digest of all inputs, parameters and tool versions
    inputs: Mapping[str, str]  # name of each input -> its digest
    parameters: Mapping[str, object]
    tools: Mapping[str, str]  # package -> version
    seconds: float
    measured: Mapping[str, object]  # errors, sizes and acceptance, as measured
    files: Mapping[str, FileEntry]  # path below the folder -> digest and size; without the manifest itself

    @property
    def digest(self) -> str:
        """Digest of the contents, independent of their inputs."""
        text = "\n".join(f"{name} {entry.sha256}" for name, entry in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Every file below the folder except its manifest; links are followed."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(sha256=sha256(path), size=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None if it has none: it was not made by `dflash-serve build`.

    Raises:
        UserError: the manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(read_text(path, CONFIG))
    except (ValidationError, UserError):
        raise UserError("cannot be read as a manifest", where=str(path), do=DO) from None


def checksum_problems(folder: Path) -> list[Problem]:
    """Problems of the files that differ from the folder's manifest; [] for a folder without one.

    Raises:
        UserError: the manifest cannot be read.
    """
    manifest = read_manifest(folder)
    return [] if manifest is None else list(_differences(folder, manifest))


def _differences(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield Problem("is missing", str(path), DO)
        elif path.stat().st_size != entry.size:
            yield Problem(f"has {path.stat().st_size} bytes, its manifest says {entry.size}", str(path), DO)
        elif sha256(path) != entry.sha256:
            yield Problem("its contents changed after it was built (sha256 differs)", str(path), DO)
    known = set(manifest.files)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known and name != MANIFEST:
            yield Problem("is not in the manifest", str(path), "remove it, or build it again")

"""The one resumable store: named results on disk under a key of what made them.

A key is the digest of everything that a result depends on. Results are reused under their own key only. With another
key a command starts anew and says which settings differ; the old results stay.

* `Store`: JSON values, one a line, in an append-only file. A kill can cut the last line only, and that line is dropped.
* `ResultFolders`: folders named NAME-KEY, written beside and renamed, so that a name means a whole result.
* `read_record` and `keep_record`: one measurement in a file of the cache folder, whose name has the key.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dflash_serve.common.documents import DATA, read_bytes
from dflash_serve.common.files import mend_folder, require_file, whole_folder, write_whole
from dflash_serve.common.processes import sigterm_interrupts
from dflash_serve.errors import UserError

log = logging.getLogger(__name__)
Record = TypeVar("Record", bound=BaseModel)
FIRST = b'{"key": "'  # Beginning of a store's file
KEY_LENGTH = 12  # Hexadecimal digits of a key in a folder's name: 48 bits


def digest(made_by: object) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys; other objects count by their `str`."""
    return hashlib.sha256(json.dumps(made_by, sort_keys=True, default=str).encode()).hexdigest()


def difference(mine: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """The settings in which two keys differ, for a message: `plan.samples: 64 there, 128 here`."""
    found = (f"{name}: {other!s:.60} there, {one!s:.60} here" for name, one, other in differences(mine, kept))
    return "; ".join(found) or "other settings"


def differences(mine: Mapping[str, Any], kept: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each setting in which two keys differ, `plan.samples`, with its value in both; None = not set."""
    for name in sorted({*mine, *kept}):
        one, other, path = mine.get(name), kept.get(name), f"{above}{name}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{path}.")
        elif one != other:
            yield path, one, other


class Store:
    """JSON values under names, kept in a JSONL file.

    Args:
        path: the file; None keeps everything in memory.
        made_by: all settings that the values depend on, as JSON. Values under other settings stay in the file unread.

    Attributes:
        changed: the settings in which the values in the file differ from `made_by`; None if some are under `made_by`,
            or there are none.

    Raises:
        UserError: the file cannot be read or written, or is not a store.
    """

    def __init__(self, path: Path | None, made_by: Mapping[str, Any]) -> None:
        self.path, self.values = path, dict[str, Any]()
        self.changed: str | None = None
        self._made_by, self._key = json.loads(json.dumps(made_by)), digest(made_by)
        if path is None:
            return
        try:
            self._declared = self._read(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot be used ({error.strerror})", where=str(path), do="name another --output") from None

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def put(self, name: str, value: Any) -> None:
        """Keeps a JSON value; it is on disk when this returns."""
        self.values[name] = value
        if self.path is None:
            return
        if not self._declared:
            self._write({"key": self._key, "made_by": self._made_by})
            self._declared = True
        self._write({"key": self._key, "name": name, "value": value})

    def close(self, *, remove: bool = False) -> None:
        """Ends writing, and removes the file if asked to."""
        if self.path is not None:
            with suppress(OSError):  # `put` has said that the disk is full
                self._file.close()
            if remove:
                self.path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            what = f"cannot be written ({error.strerror})"
            raise UserError(what, where=str(self.path), do="make room, then go on") from None

    def _read(self, path: Path) -> bool:
        """Reads the values under our key; True if the file has that key."""
        if not path.exists():
            return False
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # a kill may have cut the last line
        keys = dict[str, Any]()
        try:
            for line in map(json.loads, whole.splitlines()):
                if "made_by" in line:
                    keys[line["key"]] = line["made_by"]
                    continue
                if line["key"] == self._key:
                    self.values[line["name"]] = line["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            keys = {}
        if not keys and (whole or not FIRST.startswith(text[: len(FIRST)])):
            raise UserError("not a file of kept results", where=str(path), do="remove it")
        others = [made_by for key, made_by in keys.items() if key != self._key]
        if others and not self.values:
            self.changed = difference(self._made_by, others[-1])
        if whole != text:
            os.truncate(path, len(whole))  # nothing else changes, so that a kill here loses nothing
        return self._key in keys


@contextmanager
def resumable(output: Path, made_by: Mapping[str, Any], what: str, *, resume: bool) -> Iterator[Store]:
    """A store beside a command's output, which is removed when the block ends well.

    If it ends otherwise (by SIGTERM, too), stderr says what is kept and how to go on. With `resume` and settings other
    than those of the kept results the command starts anew, and stderr says which settings differ.

    Args:
        what: the message's name for the values: `finished answers`.

    Raises:
        UserError: there are kept results and `resume` is not given, there are none and it is, or `Store` raises it.
    """
    path = output.parent / f"{output.name}.partial.jsonl"
    if resume and not path.exists():
        raise UserError("nothing to go on with", where=str(path), do="leave out --resume")
    require_file(output)
    if path.exists() and not resume:
        do = "go on with it by --resume, or remove it"
        raise UserError("an interrupted run is there", where=str(path), do=do)
    store = Store(path, made_by)
    if store.changed:
        print(f"{path}: its results were made with other settings ({store.changed}); starting anew", file=sys.stderr)
    try:
        with sigterm_interrupts():
            yield store
    except BaseException:
        store.close(remove=not store.values and not store.changed)
        if store.values:
            words = [word for word in sys.argv[1:] if word != "--resume"]
            end = words.index("--") if "--" in words else len(words)  # behind it stand an engine's own arguments
            again = shlex.join(["dflash-serve", *words[:end], "--resume", *words[end:]])
            print(f"{len(store.values)} {what} are kept in {path}; go on with: {again}", file=sys.stderr)
        raise
    store.close(remove=True)


class ResultFolders:
    """Results that are folders, in one folder: NAME-KEY, the key cut to twelve digits."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str, key: str) -> Path:
        return self.root / f"{name}-{key[:KEY_LENGTH]}"

    def get(self, name: str, key: str) -> Path | None:
        """The finished result; None if there is none. No other process may be writing it."""
        path = self.path(name, key)
        mend_folder(path)
        return path if path.is_dir() else None

    def put(self, name: str, key: str) -> AbstractContextManager[Path]:
        """An empty folder to fill, which replaces the result when the block ends well; see `whole_folder`."""
        mend_folder(self.path(name, key))
        return whole_folder(self.path(name, key))

    def under_other_keys(self, name: str, key: str) -> list[Path]:
        """Results of that name under other keys, the newest first."""
        found = [path for path in self.root.glob(f"{name}-*") if path.is_dir() and path != self.path(name, key)]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def remove_unfinished(self) -> None:
        """Removes the scratch folders of writers that were killed."""
        for folder in filter(Path.is_dir, self.root.glob(".*")):
            shutil.rmtree(folder)


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """Reads a record of earlier measurements; None if it is missing or unreadable."""
    try:
        return kind.model_validate_json(read_bytes(path, DATA))
    except (UserError, ValidationError):
        return None


def keep_record(path: Path, record: BaseModel, otherwise: str) -> None:
    """Writes a record. A failure is only logged, after `otherwise`, which says what follows from it."""
    try:
        write_whole(path, record.model_dump_json(indent=1))
    except UserError as error:
        log.warning("%s: %s", otherwise, error)

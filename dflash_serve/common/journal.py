"""Finished answers of a long command on disk, a line each: however it ends, it can go on where it stopped."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_serve.common.processes import sigterm_interrupts
from dflash_serve.errors import UserError


class Journal:
    """A JSONL file of finished answers under their names; the first line says what they belong to.

    Args:
        path: the file; None keeps everything in memory.
        belongs_to: settings and sides; a journal of others is refused.
        resume: go on with the file that is there.

    Raises:
        UserError: there is one and `resume` is not given, there is none and it is, it belongs to another run,
            or it cannot be read or written.
    """

    def __init__(self, path: Path | None, belongs_to: dict[str, Any], *, resume: bool = False) -> None:
        self.path, self.entries = path, dict[str, Any]()
        if path is None:
            return
        try:
            if resume:
                self._read(path, belongs_to)
            elif path.exists():
                do = "go on with it by --resume, or remove it"
                raise UserError("an interrupted run is there", where=str(path), do=do)
            self._file = path.open("a", encoding="utf-8")
            if not resume:
                self._write({"belongs_to": belongs_to})
        except OSError as error:
            raise UserError(f"cannot be used ({error.strerror})", where=str(path), do="name another --output") from None

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    def get(self, name: str, default: Any = None) -> Any:
        """What is kept under a name."""
        return self.entries.get(name, default)

    def put(self, name: str, value: Any) -> None:
        """Keeps a JSON value; it is on disk when this returns."""
        self.entries[name] = value
        if self.path is not None:
            self._write({"name": name, "value": value})

    def close(self, *, remove: bool = False) -> None:
        """No more writing; `remove` = nothing is left to go on with."""
        if self.path is not None:
            self._file.close()
            if remove:
                self.path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _read(self, path: Path, belongs_to: dict[str, Any]) -> None:
        if not path.exists():
            raise UserError("nothing to go on with", where=str(path), do="leave out --resume")
        text = path.read_text(encoding="utf-8")
        whole, _, _ = text.rpartition("\n")  # a kill may have cut the last line
        try:
            first, *lines = [json.loads(line) for line in whole.split("\n")]
            entries = {line["name"]: line["value"] for line in lines}
            found = first["belongs_to"]
        except (ValueError, KeyError, TypeError):
            raise UserError("not a journal of ours", where=str(path), do="remove it") from None
        if found != json.loads(json.dumps(belongs_to)):
            different = ", ".join(sorted(key for key in belongs_to if found.get(key) != belongs_to[key])) or "settings"
            do = "give the same options as then, or remove it"
            raise UserError(f"it belongs to another run ({different})", where=str(path), do=do)
        self.entries = entries
        path.write_text(whole + "\n", encoding="utf-8")


@contextmanager
def resumable(output: Path, belongs_to: dict[str, Any], what: str, *, resume: bool) -> Iterator[Journal]:
    """The journal beside a command's output; it is gone once the block has ended well.

    If the block ends otherwise, and by SIGTERM, too, stderr says what is kept and how to go on with it.

    Args:
        what: what the message calls its entries: `finished answers`.

    Raises:
        UserError: as `Journal` raises it.
    """
    journal = Journal(output.with_name(output.name + ".partial.jsonl"), belongs_to, resume=resume)
    try:
        with sigterm_interrupts():
            yield journal
    except BaseException:
        journal.close(remove=not journal.entries)
        if journal.entries:
            again = shlex.join(["dflash-serve", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
            print(f"{len(journal.entries)} {what} are kept in {journal.path}; go on with: {again}", file=sys.stderr)
        raise
    journal.close(remove=True)

"""Files and folders written whole or not at all, and checksums."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from dflash_serve.errors import UserError


def cache_home() -> Path:
    """The cache folder of dflash-serve; follows XDG_CACHE_HOME.

    Raises:
        UserError: there is no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "dflash-serve"
    except RuntimeError:  # no HOME, and a user that the system does not know
        raise UserError("there is no home folder for the cache", do="set HOME or XDG_CACHE_HOME") from None


def sha256(path: Path) -> str:
    """Checksum of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: str | bytes, *, do: str = "name another place", private: bool = False) -> None:
    """Writes a file (text as UTF-8) under a scratch name beside it, then renames: no reader sees half of it.

    Args:
        do: advice for the user if it cannot be written.
        private: only the owner may read it.

    Raises:
        UserError: it cannot be written; what was there before is untouched.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    scratch = _scratch(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.touch(mode=0o600 if private else 0o666)  # less the umask
        scratch.write_bytes(data)
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):  # nothing was written where the folder itself could not be
            scratch.unlink()
        raise UserError(f"cannot be written ({error.strerror})", where=str(path), do=do) from None


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` to fill, which takes its place when the block ends well.

    The previous contents are moved aside first and deleted last, so that they survive a failure. A block that raises
    leaves nothing behind.

    Raises:
        OSError: it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch(folder)
    old = scratch.with_name(f"{scratch.name}.old")
    scratch.mkdir()
    try:
        yield scratch
        # safetensors' writer makes files private: give them the mode that the umask gives new files.
        mode = scratch.stat().st_mode & 0o666
        for path in scratch.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(mode)
        if folder.exists():
            folder.rename(old)
        try:
            scratch.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        if old.exists():
            shutil.rmtree(old)
    except Exception as error:
        if type(error).__name__ == "SafetensorError" and (code := re.search(r"\(os error (\d+)\)", str(error))):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error  # its writer's error is no OSError
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def mend_folder(folder: Path) -> None:
    """Cleans up after a process that was killed inside `whole_folder`.

    The folder that it had moved aside comes back and its scratch folder is removed. Do not call this while another
    process may be writing the folder.
    """
    leftovers = sorted(folder.parent.glob(f".{folder.name}.*"), key=lambda path: path.stat().st_mtime)
    for path in reversed(leftovers):
        if path.suffix == ".old" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def require_writable(folder: Path) -> None:
    """Makes a folder and checks that it can be written, before hours are spent on its contents.

    Raises:
        UserError: it cannot be made, or nothing can be written in it.
    """
    probe = folder / ".writable"
    try:
        write_whole(probe, "")
    except UserError as error:
        raise UserError(error.what, where=str(folder), do="name another --output") from None
    probe.unlink()


def require_file(path: Path) -> None:
    """Checks that a report can be written, before hours are spent on it; makes its folder.

    Raises:
        UserError: it is a folder, or nothing can be written there.
    """
    if path.is_dir():
        raise UserError("a folder, no file", where=str(path), do="name a file in it as --output")
    require_writable(path.parent)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")


PREFIX, LOCK = "dflash-serve-", "lock"


def temporary_folder() -> Path:
    """A new folder in the temporary one, where those that earlier servers of this user left are removed.

    A folder is in use as long as its file `lock` is locked: by this process, and by the server that it becomes.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # one in use, or gone meanwhile
            if lock.lstat().st_uid == os.getuid():  # asked first: what another user put there is not opened
                with lock.open() as file:
                    flock(file, LOCK_EX | LOCK_NB)
                    shutil.rmtree(lock.parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    unlocked = folder / f"{LOCK}.new"  # renamed when it is locked, so that no other process locks it first
    descriptor = os.open(unlocked, os.O_CREAT | os.O_WRONLY, 0o600)  # never closed: the server inherits it
    flock(descriptor, LOCK_EX)
    os.set_inheritable(descriptor, True)
    unlocked.rename(folder / LOCK)
    return folder


def remove_temporary(folder: Path) -> None:
    """Removes a folder that `temporary_folder` has made; any other folder stays."""
    if folder.name.startswith(PREFIX) and (folder / LOCK).exists():
        shutil.rmtree(folder, ignore_errors=True)

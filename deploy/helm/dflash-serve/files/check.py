"""Checks a node and its volumes before an engine starts, for faults that the engine would not report.

Standard library only: it runs in every engine's image.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    """Exit code 0 if nothing is wrong; otherwise a line for each problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memlock", action="store_true")
    parser.add_argument("--writable", type=Path, action="append", default=[])
    parser.add_argument("--file", type=Path, action="append", default=[])
    given = parser.parse_args()
    problems = [*memlock(given.memlock), *map(unwritable, given.writable), *map(missing, given.file)]
    found = [problem for problem in problems if problem]
    if found:
        sys.exit("\n".join(found))


def memlock(asked: bool) -> Iterator[str]:
    """RDMA needs locked memory; NCCL silently falls back to TCP where memory cannot be locked."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if asked and limit != resource.RLIM_INFINITY:
        do = "set LimitMEMLOCK=infinity for the node's containerd (systemctl edit containerd) and restart it"
        yield f"ulimit -l: {limit >> 10} KiB of memory may be locked, and RDMA would fall back to TCP; {do}"


def unwritable(folder: Path) -> str:
    """The problem of a folder that this user cannot write: a driver without fsGroup, or another owner."""
    probe = folder / f".writable-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        do = f"chown it to {os.getuid()}, name its group in security.supplementalGroups, or use a driver with fsGroup"
        return f"{folder}: user {os.getuid()} cannot write it ({error.strerror}); {do}"
    return ""


def missing(file: Path) -> str:
    """The problem of a file that is not there."""
    return "" if file.is_file() else f"{file}: not there; put it there, or let models.download fetch it"


if __name__ == "__main__":
    main()

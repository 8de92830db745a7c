"""The faults of `upstream/`: run before and after their patches, on an engine's environment that is left as it is.

`python -m tests.support.upstream PYTHON ENGINE FOLDER` says which of them another release, in a folder, has mended.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

UPSTREAM = Path(__file__).parents[2] / "upstream"
SAYS = {1: "fault: ", 0: "mended: "}  # begin the last line of a reproduction, by its exit code


class UnclearError(Exception):
    """A reproduction ended without an answer."""


@dataclass(frozen=True)
class Fault:
    """One folder of `upstream/`."""

    folder: Path

    def __str__(self) -> str:
        return self.folder.name

    @property
    def engine(self) -> str:
        return self.folder.name.partition("-")[0]

    @property
    def issue(self) -> str:
        return (self.folder / "ISSUE.md").read_text(encoding="utf-8")

    @property
    def patch(self) -> str | None:
        file = self.folder / "change.patch"
        return file.read_text(encoding="utf-8") if file.exists() else None

    @property
    def patched_lines(self) -> int:
        """Lines that the patch adds or takes away."""
        return len(re.findall(r"^[+-](?![+-]{2} )", self.patch or "", re.MULTILINE))

    def is_there(self, python: str, path: Path | None = None) -> bool:
        """True if the reproduction finds the fault.

        Args:
            path: folder that is imported from before the environment of `python`; else PYTHONPATH counts.

        Raises:
            UnclearError: it ended in another way.
        """
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"PYTHONPATH": str(path)} if path else {}
        command = [python, str(self.folder / "reproduce.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        last = (done.stdout.splitlines() or [""])[-1]
        if not last.startswith(SAYS.get(done.returncode, "\n")):
            raise UnclearError(f"{self}: exit code {done.returncode}, {last!r}: {done.stderr[-2000:]}")
        return done.returncode == 1


FAULTS = [Fault(file.parent) for file in sorted(UPSTREAM.glob("*/reproduce.py"))]


def site_packages(python: str) -> Path:
    """The folder of an environment's packages."""
    (folder,) = Path(python).parents[1].glob("lib/python3*/site-packages")
    return folder


def patched(fault: Fault, packages: Path, folder: Path) -> Path:
    """Fills a folder with the engine's package: links, but for the files that the patch changes."""
    assert fault.patch is not None
    for name in re.findall(r"^\+\+\+ b/(\S+)", fault.patch, re.MULTILINE):
        for parent in [*reversed(Path(name).parents)][1:]:
            here = folder / parent
            if here.is_symlink():
                here.unlink()
            here.mkdir(exist_ok=True)
            for entry in (packages / parent).iterdir():
                if not (here / entry.name).exists():
                    (here / entry.name).symlink_to(entry)
        (folder / name).unlink()
        (folder / name).write_bytes((packages / name).read_bytes())
    command = ["patch", "-p1", "--forward", "--fuzz=0", "--input", str(fault.folder / "change.patch")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def ask_release(python: str, engine: str, folder: Path) -> int:
    """Prints what a release has mended. The exit code is 1 if a reproduction has to be written anew."""
    unclear = 0
    for fault in FAULTS:
        if fault.engine == engine:
            try:
                said = "still there" if fault.is_there(python, folder) else "mended upstream: see upstream/README.md"
            except UnclearError as error:
                said, unclear = f"no answer: {error}", 1
            print(f"{fault}: {said}", flush=True)
    return unclear


if __name__ == "__main__":
    sys.exit(ask_release(sys.argv[1], sys.argv[2], Path(sys.argv[3]).absolute()))

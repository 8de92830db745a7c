"""Process 1 of a container, before it becomes the container's command: makes its root, enters it, gives up its rights.

unshare --mount --pid --net --fork python container_init.py SPEC.json
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x1 | 0x40
ENTERED = "the container begins"
"""In its log: from here on it is what it will be."""
ROOT = Path(__file__).parents[2]
STAND_IN = {
    "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "backends", ROOT / "engines"))),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""The environment in place of an image's; this checkout, wherever that environment has installed the project from."""
DEVICES = ("null", "zero", "full", "random", "urandom")


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def bind(source: Path, root: Path, at: Path | None = None) -> None:
    """Read-only, at the same path unless told otherwise."""
    target = root / str(at or source).lstrip("/")
    target.mkdir(parents=True, exist_ok=True)
    mount("--bind", str(source), str(target))
    mount("-o", "remount,bind,ro", str(target))


def stand_in(root: Path) -> None:
    """A root file system of this machine's own programs."""
    mount("-t", "tmpfs", "-o", "mode=0755", "root", str(root))
    for name in ("bin", "sbin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            bind(path, root)
    bind(Path("/usr"), root)
    shutil.copytree("/etc", root / "etc", symlinks=True, ignore_dangling_symlinks=True)


def system(root: Path) -> None:
    """Adds the file systems that a container runtime adds to an image."""
    bind(Path("/sys"), root)
    (root / "proc").mkdir(exist_ok=True)
    mount("-t", "proc", "proc", str(root / "proc"))
    (root / "dev").mkdir(exist_ok=True)
    for name in DEVICES:
        (root / "dev" / name).touch()
        mount("--bind", f"/dev/{name}", str(root / "dev" / name))


def volumes(root: Path, spec: dict[str, Any]) -> None:
    for path in spec["writable"]:
        target = root / path.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", f"uid={spec['user']},gid={spec['user']},mode=0770", "emptydir", str(target))
    for path, files in spec["files"].items():
        folder = root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    for inside, outside in spec["given"].items():
        bind(Path(outside), root, Path(inside))


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    root = Path(spec["root"])
    mount("--make-rprivate", "/")
    if spec["image"] is None:
        stand_in(root)
    else:
        mount("--bind", spec["image"], str(root))
    system(root)
    volumes(root, spec)
    for path in spec["visible"]:  # after the volumes: a checkout below /tmp would lie under the pod's own /tmp
        bind(Path(path), root)
    mount("-o", "remount,ro" if spec["image"] is None else "remount,bind,ro", str(root))
    loopback_up()
    os.chroot(root)
    os.chdir("/")
    rights = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
    user = (f"--reuid={spec['user']}", f"--regid={spec['user']}")
    command = ["setpriv", *user, *rights, "--", *spec["command"]]
    print(ENTERED, flush=True)
    os.execve("/usr/bin/setpriv", command, spec["environment"])


if __name__ == "__main__":
    main()

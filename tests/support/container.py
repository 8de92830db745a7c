"""A pod's container on this machine, without a container engine: the same user, capabilities, mounts and environment.

Root, `unshare` and `mount` make it: namespaces of its own for mounts, processes and the network, and a read-only root
file system, which is an image that was built, or this machine's programs with this Python and this project.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.container_init import ENTERED, ROOT, STAND_IN
from tests.support.images import Image

INIT = Path(__file__).with_name("container_init.py")
UNPRIVILEGED = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")


def why_not() -> str | None:
    """The thing that this machine lacks; None if it has everything."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "mount"))):
        return "util-linux is not installed"
    namespaces = ["unshare", "--mount", "--pid", "--net", "--fork"]
    tried = subprocess.run([*namespaces, "mount", "--make-rprivate", "/"], capture_output=True, check=False)
    return "this machine allows no namespaces" if tried.returncode else None


@dataclass(frozen=True)
class Spec:
    """A container as Kubernetes is told of it."""

    command: list[str]
    environment: dict[str, str]
    user: int
    writable: list[str]
    """Mount paths of its emptyDirs."""
    files: dict[str, dict[str, str]]
    """Mount path of a ConfigMap -> its files."""
    given: dict[str, str] = field(default_factory=dict)
    """Path in the container -> path here: checkpoints that a claim would hold."""
    image: Image | None = None
    """None = this machine's programs stand in for one."""


def spec_of(
    pod: Mapping[str, Any],
    config_maps: Mapping[str, Mapping[str, str]],
    given: Mapping[str, Path],
    image: Image | None = None,
) -> Spec:
    """The specification of a pod's first container, without optional Secrets."""
    container = pod["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    named = {path: volume["configMap"]["name"] for path, volume in mounts.items() if "configMap" in volume}
    return Spec(
        command=[*container["command"], *container.get("args", [])],
        environment={variable["name"]: variable["value"] for variable in container["env"]},
        user=pod["securityContext"]["runAsUser"],
        writable=[path for path, volume in mounts.items() if "emptyDir" in volume],
        files={path: dict(config_maps[name]) for path, name in named.items()},
        given={inside: str(outside) for inside, outside in given.items()},
        image=image,
    )


@dataclass
class Container:
    """A running one."""

    process: subprocess.Popen[bytes]
    spec: Spec
    log: Path

    def begin(self) -> None:
        """Waits until its root is built and entered."""
        end = time.monotonic() + 60
        while ENTERED not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """PID of the container's process 1 on this machine."""
        here = self.process.pid
        assert self.process.poll() is None, f"it has ended: {self.log.read_text()}"
        return int(Path(f"/proc/{here}/task/{here}/children").read_text().split()[0])

    def run(self, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command inside, as the container's user, like `kubectl exec`."""
        user = (f"--reuid={self.spec.user}", f"--regid={self.spec.user}", *UNPRIVILEGED)
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--root"]
        # nsenter's own --wd is outside the new root, where oneMKL, which asks for it, ends the process.
        whole = [*enter, "/usr/bin/env", "--chdir=/", "/usr/bin/setpriv", *user, "--", *argv]
        return subprocess.run(whole, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)

    def outside(self, *argv: str) -> subprocess.Popen[str]:
        """A client: this machine's files, the container's network."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--"]
        return subprocess.Popen([*enter, *argv], stdout=subprocess.PIPE, text=True, cwd=ROOT)

    @property
    def environment(self) -> dict[str, str]:
        """The image's, and the pod's."""
        return environment(self.spec)

    def terminate(self) -> None:
        """Sends SIGTERM, as the kubelet does after preStop."""
        os.kill(self.pid, signal.SIGTERM)

    def probe(self, probe: Mapping[str, Any]) -> bool:
        """One try of a Kubernetes probe."""
        if "exec" in probe:
            return self.run(*probe["exec"]["command"], timeout=probe["timeoutSeconds"] + 10).returncode == 0
        code = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=float(sys.argv[2]))"
        url = f"http://127.0.0.1:8000{probe['httpGet']['path']}"
        return self.run("python3", "-c", code, url, str(probe["timeoutSeconds"])).returncode == 0

    def wait_for(self, probe: Mapping[str, Any]) -> None:
        """Until a probe passes, for as long as the kubelet would go on trying."""
        end = time.monotonic() + probe["periodSeconds"] * probe["failureThreshold"]
        while not self.probe(probe):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"never {probe}: {self.log.read_text()}"
            time.sleep(1.0)


def environment(spec: Spec) -> dict[str, str]:
    """Environment of the container's command."""
    return {**(STAND_IN if spec.image is None else spec.image.environment), **spec.environment}


@contextmanager
def container(spec: Spec, folder: Path, *more: Path) -> Iterator[Container]:
    """Runs it until the block ends.

    Args:
        more: folders of this machine that are visible in it.
    """
    log = folder / "container.log"
    ours = () if spec.image else (Path(sys.prefix), Path(sys.base_prefix), ROOT)
    told = {
        **vars(spec),
        "root": str(folder / "root"),
        "visible": [str(path) for path in (*ours, *more)],
        "environment": environment(spec),
        "image": spec.image and str(spec.image.root),
    }
    (folder / "root").mkdir()
    (folder / "spec.json").write_text(json.dumps(told))
    argv = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", sys.executable, str(INIT)]
    with log.open("wb") as out:
        running = Container(subprocess.Popen([*argv, str(folder / "spec.json")], stdout=out, stderr=out), spec, log)
    try:
        running.begin()
        yield running
    finally:
        running.process.kill()
        running.process.wait()

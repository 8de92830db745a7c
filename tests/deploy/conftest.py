"""These need tools beside Python's, which `make test-deploy` gets; elsewhere they are not collected.

`make test-images` builds the images besides: DFLASH_SERVE_TEST_IMAGES=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.images import BUNDLED, TORCH, Buildah, Image, debian, wheelhouse, why_not
from tests.support.registry import registry

BUILT = bool(os.environ.get("DFLASH_SERVE_TEST_IMAGES"))
collect_ignore_glob = [] if os.environ.get("DFLASH_SERVE_TEST_DEPLOY") else ["test_*.py"]
if not BUILT:
    collect_ignore_glob.append("test_images.py")


@pytest.fixture(scope="session")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """A store of images, empty, and a registry for them."""
    reason = why_not()
    assert reason is None, reason
    wheelhouse()
    folder = tmp_path_factory.mktemp("images")
    with registry(folder) as address:
        builder = Buildah(folder, address)
        try:
            yield builder
        finally:
            builder.clear()


@pytest.fixture(scope="session")
def python_base(buildah: Buildah) -> str:
    """Debian with its Python, by digest."""
    archive = debian()
    return buildah.base("python", ["FROM scratch", f"ADD {archive.name} /"], archive.parent)


@pytest.fixture(scope="session")
def torch_image(request: pytest.FixtureRequest) -> Image | None:
    """The embedded engine's image with the bundled pair; None where images are not built."""
    if not BUILT:
        return None
    base = request.getfixturevalue("python_base")
    built: Image = request.getfixturevalue("buildah").build("torch", PYTHON=base, TORCH=TORCH, BUNDLED=BUNDLED)
    return built

"""Our images, built for real and run: the embedded engine's and the builder's whole, the layers over a stand-in engine.

`make test-images`; what the embedded engine's image does as a pod is in test_container.py, on the same image.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.container import Container, Spec, container
from tests.support.images import OLD, TORCH, Buildah, Image

LAYERS = ("sglang", "vllm", "tensorrt-llm")
CUBINS = "def get_cubin_dir():\n    return '/usr/local/lib/flashinfer_cubin/cubins'\n"
USER = 10001
SLEEP = ["python3", "-c", "import time; time.sleep(600)"]


@pytest.fixture(scope="module")
def engine_base(buildah: Buildah, python_base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base image like an engine's: Python, pip, packages and FlashInfer's kernels, without an engine."""
    context = tmp_path_factory.mktemp("engine")
    (context / "flashinfer_cubin.py").write_text(CUBINS)
    lines = [
        f"FROM {python_base}",
        f"RUN pip install --break-system-packages {OLD} && mkdir -p /usr/local/lib/flashinfer_cubin/cubins",
        "COPY flashinfer_cubin.py /usr/local/lib/python3/dist-packages/",
        "ENV PYTHONPATH=/usr/local/lib/python3/dist-packages",
    ]
    return buildah.base("engine", lines, context)


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest, buildah: Buildah, torch_image: Image) -> Image:
    """The image of the name that the test has."""
    name: str = request.param
    if name == "torch":
        return torch_image
    if name == "engines":
        return buildah.build(name, PYTHON=request.getfixturevalue("python_base"), TORCH=TORCH, REVISION="abc")
    return buildah.build(name, BASE=request.getfixturevalue("engine_base"), REVISION="abc")


EVERY = pytest.mark.parametrize("image", [*LAYERS, "engines", "torch"], indirect=True)
EACH_LAYER = pytest.mark.parametrize("image", LAYERS, indirect=True)


@contextmanager
def idle(image: Image, folder: Path) -> Iterator[Container]:
    """A container of it in which a test runs commands, with rights and mounts as the chart gives them."""
    writable = ["/tmp", "/cache", "/prepared", "/models"]
    with container(Spec(SLEEP, {}, USER, writable, {}, {}, image), folder) as running:
        yield running


@EVERY
def test_what_was_built_says_what_it_is(image: Image) -> None:
    config = image.config
    assert (config["User"], config["WorkingDir"]) == (f"{USER}:{USER}", "/cache")
    assert config["Entrypoint"] == ["dflash-serve"]
    assert "@sha256:" in config["Labels"]["org.opencontainers.image.base.name"]
    builds = config["Labels"]["org.opencontainers.image.title"] == "dflash-serve, builds"
    assert (config["Healthcheck"]["Test"][0] == "NONE") == builds


@EVERY
def test_its_program_runs_read_only_and_without_rights(image: Image, tmp_path: Path) -> None:
    with idle(image, tmp_path) as running:
        done = running.run("dflash-serve", "--version")
        assert (done.returncode, done.stderr) == (0, "")
        assert "Read-only file system" in running.run("touch", "/usr/local/new").stderr
        assert all(running.run("touch", f"{path}/new").returncode == 0 for path in running.spec.writable)
    print(f"{image.config['Labels']['org.opencontainers.image.title']}: {image.megabytes} MB")


@EACH_LAYER
def test_a_layer_leaves_what_the_engine_brought(image: Image, tmp_path: Path) -> None:
    with idle(image, tmp_path) as running:
        code = "from importlib.metadata import version as v; print(f'prometheus-client=={v(\"prometheus-client\")}')"
        assert running.run("python3", "-c", code).stdout.strip() == OLD
        assert running.run("python3", "-c", "import torch").returncode != 0  # nothing was pulled in beside it


@EACH_LAYER
def test_a_layers_kernels_are_linked_where_a_read_only_pod_can_write(image: Image, tmp_path: Path) -> None:
    with idle(image, tmp_path) as running:
        folder = "/usr/local/lib/flashinfer_cubin/cubins/flashinfer"
        assert running.run("readlink", folder).stdout.strip() == "/tmp"
        assert running.run("mkdir", f"{folder}/trtllm").returncode == 0


@pytest.mark.parametrize("image", ["engines"], indirect=True)
def test_the_builders_image_has_what_quantises(image: Image, tmp_path: Path) -> None:
    with idle(image, tmp_path) as running:
        done = running.run("python3", "-c", "import modelopt.torch.quantization", timeout=300)
        assert done.returncode == 0, done.stderr
        assert running.run("dflash-serve", "build", "--help").returncode == 0


def test_the_embedded_image_has_no_pip_and_no_compiler(torch_image: Image, tmp_path: Path) -> None:
    with idle(torch_image, tmp_path) as running:
        assert running.run("/opt/dflash-serve/bin/python", "-m", "pip", "--version").returncode != 0
        assert running.run("which", "gcc").returncode != 0
    packages = torch_image.root / "opt/dflash-serve"
    assert next(packages.glob("lib/python3*/site-packages/torch/__pycache__/*.pyc"))  # a read-only root has none later
    du = subprocess.run(["du", "--summarize", "--block-size=1M", packages], capture_output=True, text=True, check=True)
    print(f"torch: {du.stdout.split()[0]} MiB in /opt/dflash-serve, Python {sys.version_info[:2]}")

"""The wheel, built once, in environments of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Iterable, Iterator
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.support.caches import own_cache

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` would get; pip fetches the build backend where it is not there."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(words, capture_output=True, text=True, check=False)
    if re.search(
        "(No matching distribution found for|Could not find a version that satisfies).*hatchling", built.stderr
    ):
        pytest.skip("hatchling cannot be fetched, so no wheel can be built")
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pip install dflash_serve-*.whl` without an extra: its command.

    Its requirements are linked from this environment, so that nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        needs = message_from_bytes(opened.read(metadata)).get_all("Requires-Dist", [])
    for name in sorted(_required(needs, set())):
        _link(name, packages)
    words = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*words, str(wheel)], check=True)
    return folder / "bin" / "dflash-serve"


@pytest.fixture
def run(bare: Path, tmp_path: Path) -> Run:
    """Runs the command of the bare install in an empty folder; it must leave it empty."""
    place = tmp_path / "empty"
    place.mkdir()

    def call(*words: str, extras: bool = False) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(bare.parent), "HOME": str(tmp_path), "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
        if extras:  # what is installed here, as far as it is not ours: that is not in this folder, or the same
            env |= {"PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1"}
            env |= {"XDG_CACHE_HOME": str(own_cache(tmp_path / "cache"))}
        done = subprocess.run([bare, *words], cwd=place, env=env, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        assert list(place.iterdir()) == []
        return done

    return call


def _required(lines: Iterable[str], known: set[str]) -> set[str]:
    """Distributions that these lines of metadata ask for, extras apart, and what those need."""
    for line in lines:
        words, _, condition = line.partition(";")
        needed = re.split(r"[^\w.-]", words.strip())[0]
        if "extra ==" in condition or needed in known or not _installed(needed):
            continue
        known |= {needed}
        _required(distribution(needed).requires or [], known)
    return known


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except ModuleNotFoundError:  # of another platform or Python
        return False
    return True


def _link(name: str, packages: Path) -> None:
    for top in sorted(set(_tops(name))):
        place = packages / top.name
        if not place.exists():
            place.symlink_to(top)


def _tops(name: str) -> Iterator[Path]:
    """Its packages and modules in this environment."""
    found = distribution(name)
    for file in found.files or []:
        if ".." not in file.parts and file.parts[0] != "__pycache__":
            yield Path(str(found.locate_file(file.parts[0])))

"""The Python of vLLM 0.33.0 without its kernels, for tests of what we take from it; prints its folder.

`--newest` fetches the newest release instead, into build/newest/vllm, for the scheduled tests that look ahead.

There is no build of it for CPUs. With the folder first in PYTHONPATH, the environment of `make test-vllm` imports it in
place of vLLM 0.32: parser, configuration, schedulers, metrics and classes of models. Only Python is kept of the wheel
(336 MB, of which 12 MB are Python), so nothing can be computed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tests.support.pinned_wheels import PIP, PinnedWheel, kept

WHEEL = PinnedWheel(
    "vllm",
    "0.33.0",
    "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
    platform="manylinux_2_28_x86_64",
)
NEWEST = Path("build/newest/vllm")


def vllm_python() -> Path:
    """The folder, fetched if it is not there yet."""
    return kept(f"vllm-{WHEEL.version}-python", WHEEL, _unpack)


def newest_vllm_python(folder: Path) -> Path:
    """The folder with the newest release's Python; whatever was in it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        machine = ("--only-binary", ":all:", "--platform", WHEEL.platform)
        subprocess.run([*PIP, *machine, "--dest", scratch, WHEEL.package], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        _unpack(wheel, folder)
    return folder.absolute()


def _unpack(wheel: Path, folder: Path) -> None:
    version = wheel.name.split("-")[1].partition("+")[0]
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [name for name in opened.namelist() if name.endswith(".py")])
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    # `+cpu` makes vLLM choose the CPU, like `vllm_cpu/vllm_name`.
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


if __name__ == "__main__":
    begun = time.monotonic()
    print(newest_vllm_python(NEWEST) if "--newest" in sys.argv else vllm_python())
    print(f"vLLM's Python: {time.monotonic() - begun:.0f} s", file=sys.stderr)

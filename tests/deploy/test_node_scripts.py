"""Scripts that run on a node before an engine starts: files/check.py of the chart, and link_cubins.sh of the images."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chart import CHART, ROOT

CHECK = CHART / "files" / "check.py"
ANOTHER_USER = 10001
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")
"""One that any user can run: this one may lie in somebody's home."""


def checked(*arguments: str, before: Callable[[], None] | None = None, another_user: bool = False) -> tuple[int, str]:
    python, user = (str(SYSTEM_PYTHON), ANOTHER_USER) if another_user else (sys.executable, None)
    argv = [python, "-c", CHECK.read_text(), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=before, user=user)
    return done.returncode, done.stderr


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))


def test_a_limit_on_locked_memory_ends_the_pod_with_what_to_do() -> None:
    code, said = checked("--memlock", before=limited)
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith(
        "ulimit -l: 8192 KiB of memory may be locked, and RDMA would fall back to TCP; set LimitMEMLOCK"
    )
    assert checked(before=limited) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0 or SYSTEM_PYTHON is None, reason="becomes another user")
def test_a_folder_that_the_user_cannot_write_ends_the_pod_with_what_to_do(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    locked, missing = tmp_path / "claim", tmp_path / "o200k_base.tiktoken"
    locked.mkdir(mode=0o755)
    code, said = checked(f"--writable={locked}", f"--file={missing}", another_user=True)
    assert code == 1
    first, second = said.splitlines()
    assert first.startswith(
        f"{locked}: user {ANOTHER_USER} cannot write it (Permission denied); chown it to {ANOTHER_USER}"
    )
    assert second == f"{missing}: not there; put it there, or let models.download fetch it"
    missing.touch()
    assert checked(f"--writable={tmp_path}", f"--file={missing}") == (0, "")


def test_kernels_that_flashinfer_links_into_its_own_package_go_where_a_container_may_write(tmp_path: Path) -> None:
    """With a package like flashinfer-cubin, and a python3 that finds it."""
    package = tmp_path / "site" / "flashinfer_cubin"
    (package / "cubins").mkdir(parents=True)
    (package / "__init__.py").write_text(f"def get_cubin_dir(): return {str(package / 'cubins')!r}\n")
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")}

    def linked(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        argv = ["sh", str(ROOT / "deploy/docker/link_cubins.sh"), *words]
        return subprocess.run(argv, env={**environment, **more}, capture_output=True, text=True, check=False)

    assert linked("probe").returncode == 1  # without the link it would write into the package
    folder = package / "cubins" / "flashinfer"
    assert linked().returncode == 1
    shutil.rmtree(folder)
    assert [linked().returncode, linked("probe").returncode] == [0, 0]
    assert (folder.is_symlink(), os.readlink(folder)) == (True, "/tmp")
    assert not Path("/tmp/trtllm").exists()
    assert "nothing to link" in linked(PYTHONPATH="").stdout

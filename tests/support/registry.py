"""An OCI registry on this machine: Debian's docker-registry, without TLS, in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_serve.common.processes import free_port

from .debian import program

USER, PASSWORD = "publisher", "secret"
HTPASSWD = f"{USER}:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"
"""bcrypt, which is all that it reads."""


@contextmanager
def registry(folder: Path, *, closed: bool = False) -> Iterator[str]:
    """Its address, `127.0.0.1:PORT`, until the block ends; a closed one asks for USER and PASSWORD."""
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "version": "0.1",
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": address},
    }
    if closed:
        (folder / "htpasswd").write_text(HTPASSWD)
        settings["auth"] = {"htpasswd": {"realm": "ours", "path": str(folder / "htpasswd")}}
    (folder / "registry.yml").write_text(json.dumps(settings))  # JSON is YAML
    argv: list[str | Path] = [program("docker-registry", "docker-registry"), "serve", folder / "registry.yml"]
    with (folder / "registry.log").open("wb") as log:
        running = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        _wait(address, running, folder / "registry.log")
        yield address
    finally:
        running.terminate()
        running.wait()


def _wait(address: str, running: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/v2/", timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise AssertionError(log.read_text()) from None
            return
        except OSError:
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

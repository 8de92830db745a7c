"""Servers of the ways: started like `serve` starts them, or running already."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from dflash_serve.backend import ServerBackend
from dflash_serve.errors import UserError
from dflash_serve.proving.bench.processes import ended
from dflash_serve.proving.bench.ways import Way

START_SECONDS = 3600
"""A large model may compile for long."""
LISTENING = (200, 401, 404)


@contextmanager
def served(way: Way, backend: ServerBackend | None, log: Path) -> Iterator[str]:
    """The URL of the way's server, which is ready; one of ours ends with the block.

    Raises:
        UserError: it does not come up.
    """
    if way.url is not None or backend is None or way.deployment is None:
        yield way.url or ""
        return
    with tempfile.TemporaryDirectory(prefix="dflash-serve-bench-") as folder:
        backend.prepare(way.deployment, Path(folder))
        port = _free_port()
        command = backend.command(way.deployment, Path(folder), port=port)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            env = {**os.environ, **command.env}
            try:
                child = subprocess.Popen(  # noqa: S603 - argv, no shell
                    command.argv, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                do = f"install what --backend {backend.name} needs"
                raise UserError(f"cannot be started ({error.strerror})", where=command.argv[0], do=do) from None
            with ended(child):
                url = f"http://127.0.0.1:{port}"
                _until_ready(url, child, way, log)
                yield url


def model_of(url: str, api_key: str | None = None) -> str:
    """The first model that a server lists.

    Raises:
        UserError: no server answers, or it lists none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = Request(f"{url}/v1/models", headers=headers)  # noqa: S310
    try:
        with urlopen(request, timeout=30) as response:  # noqa: S310
            return str(json.load(response)["data"][0]["id"])
    except HTTPError as error:
        do = "give its key in DFLASH_SERVE_API_KEY" if error.code in (401, 403) else ""
        raise UserError(f"answers {error.code}", where=f"{url}/v1/models", do=do) from None
    except (URLError, OSError) as error:
        raise UserError(f"no server answers ({getattr(error, 'reason', error)})", where=url) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError("lists no models", where=f"{url}/v1/models") from None


def _until_ready(url: str, child: subprocess.Popen[bytes], way: Way, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not all(_status(f"{url}{path}") in LISTENING for path in ("/v1/models", "/health", "/ready")):
        if child.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            why = lines[-1] if lines else "it said nothing"
            raise UserError(f"its server ended ({why})", where=f"way {way.name!r}", do=f"see {log}")
        if time.monotonic() > deadline:
            raise UserError(f"no answer in {START_SECONDS} s", where=f"way {way.name!r}", do=f"see {log}")
        time.sleep(0.2)


def _status(url: str) -> int | None:
    try:
        with urlopen(url, timeout=5) as response:  # noqa: S310
            return int(response.status)
    except HTTPError as error:
        return error.code
    except (URLError, OSError):
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

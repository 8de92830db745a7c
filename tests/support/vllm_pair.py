"""A prefill half and a decode half of vLLM on a CPU, with K/V over NIXL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_serve.common.processes import free_port, running
from dflash_serve.deployment.description import Deployment

from .nixl import nixl_folders
from .vllm_server import PATIENCE, OnCpu, Server


def half(deployment: Deployment, role: str, port: int | None = None) -> tuple[Deployment, OnCpu]:
    """A server for `fleet`: the deployment as one half, which the other one finds on this machine.

    Args:
        port: of its HTTP server; None = a free one.
    """
    described = deployment.model_dump(exclude_unset=True) | {"role": role}
    path = os.pathsep.join([*nixl_folders(), os.environ.get("PYTHONPATH", "")])
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return Deployment.model_validate(described), OnCpu(env={**side_channel, "PYTHONPATH": path}, port=port)


@contextmanager
def serving_prepared(prepared: Path, folder: Path, deployment: Deployment, backend: OnCpu) -> Iterator[Server]:
    """A server that is ready, from a folder that all halves share: vLLM's halves compare the paths of their drafters.

    Args:
        prepared: has the files that the server reads.
        folder: gets its log.
    """
    port = backend.port or free_port()
    command, url = backend.launch(deployment).command(prepared, port=port), f"http://127.0.0.1:{port}"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **command.env}
    with running(command.argv, folder / "server.log", env=environment, ready=f"{url}/health", patience=PATIENCE):
        yield Server(url, folder)

"""A prefill half and a decode half of SGLang on a CPU, with K/V over NIXL."""

from __future__ import annotations

import os
from typing import Any

from dflash_serve.deployment.description import Deployment
from dflash_sglang.settings import BACKUP, TRANSFER

from .nixl import nixl_folders
from .sglang_server import FORKED, OnCpu

BOOTSTRAP = "disaggregation-bootstrap-port"


def half(
    deployment: Deployment, role: str, bootstrap_port: int, port: int | None = None, **env: str
) -> tuple[Deployment, OnCpu]:
    """A server for `fleet`: the deployment as one half, which keeps no host memory for retracted requests.

    Args:
        port: of its HTTP server; None = a free one.
        env: more variables of its environment.
    """
    given: dict[str, Any] = {TRANSFER: "nixl", BOOTSTRAP: bootstrap_port}
    if role == "decode":
        given[BACKUP] = "cpu_tensor"  # else it wants 10 GiB of free host memory
    described = deployment.model_dump(exclude_unset=True)
    described |= {"role": role, "engine_args": {"sglang": given}}
    path = os.pathsep.join([*nixl_folders(), os.environ.get("PYTHONPATH", "")])
    return Deployment.model_validate(described), OnCpu(env={**FORKED, "PYTHONPATH": path, **env}, port=port)

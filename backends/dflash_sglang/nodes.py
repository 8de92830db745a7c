"""This process's place among several nodes, as Kubernetes' LeaderWorkerSet tells it."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_serve.errors import UserError

LEADER, SIZE, INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
PORT = 20000
"""Where the leader's torch.distributed listens."""


def node_arguments(nodes: int, environment: Mapping[str, str]) -> list[str]:
    """--nnodes, --node-rank and --dist-init-addr; nothing on a single node.

    Raises:
        UserError: the environment does not say which node this is, or tells of another number of nodes.
    """
    if nodes == 1:
        return []
    missing = [name for name in (LEADER, SIZE, INDEX) if name not in environment]
    if missing:
        what = f"{nodes} nodes, but {', '.join(missing)} is not set"
        raise UserError(what, where="parallel.nodes", do="start it in a LeaderWorkerSet, or set the variables")
    if environment[SIZE] != str(nodes):
        what = f"{nodes} nodes, but {SIZE} is {environment[SIZE]}"
        raise UserError(what, where="parallel.nodes", do="make the two agree")
    address = f"{environment[LEADER]}:{PORT}"
    return ["--nnodes", str(nodes), "--node-rank", environment[INDEX], "--dist-init-addr", address]

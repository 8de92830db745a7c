"""The two sides of a verification: two running servers, one engine in this process, or a server started twice."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from dflash_serve.backend import EMBEDDED, backend, server_backend
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import read_api_key
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.proving.lossless.launched import Launcher, facts_of, new_folder
from dflash_serve.proving.lossless.sides import EndpointSide, EngineSide, Facts, Pair

Dtype = Literal["float32", "bfloat16"]


def servers(
    with_url: str | None, without_url: str | None, model: str | None, api_key_file: Path | None, concurrency: int
) -> Pair:
    """Two servers that run already.

    Raises:
        UserError: one is missing, both are the same, or an address or key cannot be used.
    """
    if with_url is None or without_url is None:
        missing = "--without" if with_url else "--with"
        raise UserError("two servers are compared", where="verify", do=f"give {missing}, too")
    key = read_api_key(api_key_file)
    speculating, plain = (Endpoint(url, model, key, concurrency=concurrency) for url in (with_url, without_url))
    if speculating.base == plain.base:
        raise UserError("both are the same server", where=plain.base, do="start a second one without speculation")
    facts: dict[str, Facts] = {
        name: {"url": side.base, "model": side.served_model}
        for name, side in (("with", speculating), ("without", plain))
    }
    return Pair(lambda: nullcontext(EndpointSide(speculating)), lambda: nullcontext(EndpointSide(plain)), facts)


def embedded(deployment: Deployment) -> tuple[Pair, Dtype]:
    """One engine in this process, and what it computes in."""
    engine = backend(EMBEDDED).engine(deployment)
    scheduler: Any = engine.scheduler  # type: ignore[attr-defined]
    facts = {
        "with": facts_of(EMBEDDED, deployment),
        "without": facts_of(EMBEDDED, deployment.model_copy(update={"drafter": None})),
    }
    sides = EngineSide(engine), EngineSide(engine.plain())
    found: Dtype = "float32" if "float32" in str(scheduler.target.embedding.dtype) else "bfloat16"
    return Pair(lambda: nullcontext(sides[0]), lambda: nullcontext(sides[1]), facts), found


def launched(name: str, deployment: Deployment, concurrency: int) -> Pair:
    """A server that is started twice, one after the other.

    Raises:
        UserError: the backend has none, or the deployment has a problem.
    """
    return Launcher(server_backend(name), new_folder(), concurrency=concurrency).pair(deployment)

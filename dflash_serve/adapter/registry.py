"""The registry of installed backends, and the drafter that a backend can serve.

Functions import what they need, because every verb imports this module for its `--help`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from dflash_serve.common.extras import absent
from dflash_serve.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from dflash_serve.adapter.protocol import Backend, InProcessBackend, ServerBackend
    from dflash_serve.checkpoint.catalogue import CataloguedDrafter
    from dflash_serve.deployment.description import Deployment

EMBEDDED = "torch"  # The backend that runs in this process


def installed() -> list[str]:
    """Names of the installed backends, sorted."""
    return sorted(_points())


def _points() -> dict[str, EntryPoint]:
    from dflash_serve.deployment.description import BACKEND_GROUP

    return {point.name: point for point in entry_points(group=BACKEND_GROUP)}


def backend(name: str) -> Backend:
    """The installed backend of that name.

    Raises:
        UserError: there is none, or what it needs is not installed.
    """
    found = _points()
    if name not in found:
        do = did_you_mean(name, found) or f"installed are: {', '.join(sorted(found)) or 'none'}"
        raise UserError(f"no backend {name!r}", where="--backend", do=do)
    try:
        loaded: Backend = found[name].load()
    except ModuleNotFoundError as error:
        raise absent(error, name) or error from None
    return loaded


def server_backend(name: str) -> ServerBackend:
    """The installed backend of that name, whose server we start.

    Raises:
        UserError: there is none, or only its engine's metrics are known.
    """
    from dflash_serve.adapter.protocol import ServerBackend

    found = backend(name)
    if not isinstance(found, ServerBackend):
        if hasattr(found, "launch") or hasattr(found, "command"):  # the second is what older packages have
            missing = [one for one in ("launch", "head_problems", "releases", "untried") if not hasattr(found, one)]
            what = f"its package was written for another dflash-serve: it lacks {', '.join(missing)}"
            raise UserError(what, where=f"--backend {name}", do="install a newer release of the package")
        what = "dflash-serve does not start it yet: it only reads the metrics of a server that runs"
        raise UserError(what, where=f"--backend {name}", do=f"use another, such as --backend {EMBEDDED}")
    return found


def embedded_backend() -> InProcessBackend:
    """The backend that runs in this process.

    Raises:
        UserError: it is not installed.
    """
    return cast("InProcessBackend", backend(EMBEDDED))


def choose_drafter(deployment: Deployment, chosen: Backend) -> tuple[Deployment, str | None]:
    """The deployment with `drafter: auto` replaced by a published drafter, and a line about the choice.

    Raises:
        UserError: no published drafter of the target is known, or none that the backend serves.
    """
    from dflash_serve.adapter.verdicts import verdict
    from dflash_serve.checkpoint.catalogue import AUTO, able_drafters, drafters_of, unknown_target
    from dflash_serve.deployment.description import Model

    if deployment.drafter is None or deployment.drafter.model != AUTO:
        return deployment, None
    target = deployment.target.model
    if not drafters_of(target):
        raise unknown_target(target)
    able = able_drafters(
        target,
        lambda one: verdict(chosen, one).verdict == "served",
        chosen.untried,
        deployment.target.quantization,
    )
    if not able:
        do = f"`dflash-serve drafters {target}` says why; use another --backend, or name one"
        raise UserError(f"no drafter of {target} is served by this backend", where="drafter.model", do=do)
    found = able[0]
    revision = deployment.drafter.revision or found.revision
    model = Model(model=found.repository, revision=revision, quantization=deployment.drafter.quantization)
    told = f"drafter: {found.repository}" + (f" at {revision}" if revision else "")
    block = f", B {found.block_size}" if found.block_size else ""
    told += f" ({found.kind}{block}), the best known of {target} that this backend serves: {_why(found, able[1:])}"
    if revision is None and "/" in found.repository:
        told += "; its revision is not pinned: set drafter.revision"
    return deployment.model_copy(update={"drafter": model}), told


def _why(found: CataloguedDrafter, others: Sequence[CataloguedDrafter]) -> str:
    # What is known of it, and why a drafter of a kind that usually accepts more was passed over.
    from dflash_serve.checkpoint.catalogue import RANKED

    figures = ", ".join(f"{one.value:g} {one.benchmark}" for one in found.acceptance_length)
    why = f"published acceptance {figures}" if figures else "no acceptance of it is published"
    passed = next((one for one in others if RANKED.index(one.kind) < RANKED.index(found.kind)), None)
    if passed is None or passed.is_proven:
        return why
    lacks = "a pinned revision" if passed.acceptance_length else "a published acceptance"
    return f"{why}; {passed.repository} ({passed.kind}) is passed over, since it lacks {lacks}"

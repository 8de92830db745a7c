"""The one rule of which engine serves which published drafter: by its parts, its weights and its target's family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dflash_serve.adapter.draft_layouts import Layouts, layout_verdict
from dflash_serve.adapter.protocol import Backend
from dflash_serve.checkpoint.catalogue import CataloguedDrafter, EngineVerdict, catalogued_drafter, catalogued_target
from dflash_serve.checkpoint.config import Heads
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.source import ALIAS, target_described
from dflash_serve.checkpoint.target import read_target_shape
from dflash_serve.errors import Problem

PLAIN = ("bf16", "fp16", "fp32")
CONVERT = "dflash-serve convert"  # In the remedy of a problem that `convert` mends


@runtime_checkable
class QuantizedDrafterBackend(Protocol):
    """A backend whose engine serves quantised drafters through dflash-serve; others serve plain weights alone."""

    layouts: Layouts

    def storage_problems(self, checkpoint: Checkpoint) -> list[Problem]:
        """Reasons why it does not serve a drafter as its weights are stored, on one device; none = it does."""
        ...


@runtime_checkable
class LimitedBackend(Protocol):
    """A backend whose engine runs some families of targets alone."""

    def target_problems(self, family: str) -> list[Problem]:
        """Reasons why it does not run a target of this family, the `model_type` of its config.json."""
        ...


def serves_format(backend: Backend, format: str) -> bool:
    """A backend serves quantised drafters of a format, in one layout at least."""
    known = backend.layouts if isinstance(backend, QuantizedDrafterBackend) else {}
    return any(kind == format and one.verdict == "served" for (_, kind), one in known.items())


def rule(
    backend: Backend,
    *,
    heads: Heads | None,
    weights: str | None,
    unread: str | None,
    family: str | None,
    layout: str | None = None,
) -> EngineVerdict:
    """An engine's verdict on a drafter, by the checks that its backend makes.

    Args:
        heads: None = not known.
        weights: format of its weights; None = not known, and taken as plain.
        unread: a part of it that dflash-serve does not read.
        family: `model_type` of its target; None = not known.
        layout: quantiser of its weights; None = not known.
    """
    if unread is not None:
        return EngineVerdict(verdict="refused", why=unread)
    if weights is not None and weights not in PLAIN:
        known = backend.layouts if isinstance(backend, QuantizedDrafterBackend) else {}
        stored = layout_verdict(known, layout, weights, backend.facts.title)
        if stored.verdict != "served":
            return stored
    if isinstance(backend, LimitedBackend):
        if family is None:
            return EngineVerdict(verdict="not known", why="the family of its target is not known")
        if problems := backend.target_problems(family):
            return EngineVerdict(verdict="refused", why=problems[0].what)
    if heads is None:
        return EngineVerdict(verdict="not known", why="its config.json is not known")
    if not (problems := backend.head_problems(heads)):
        return EngineVerdict(verdict="served")
    return _of_problem(problems[0])


def checkpoint_verdict(
    backend: Backend, checkpoint: Checkpoint, family: str | None, problems: Sequence[Problem] = ()
) -> EngineVerdict:
    """An engine's verdict on a drafter whose files are there.

    Args:
        family: as for `rule`.
        problems: of the drafter or of its target, with which no engine serves it, or serves it wrongly.
    """
    found = _stored_verdict(backend, checkpoint, family)
    others = sorted(map(_of_problem, problems), key=lambda one: one.verdict != "refused")  # those first
    if not others or found.verdict not in ("served", "after convert", "not known"):
        return found
    return found if found.verdict == others[0].verdict else others[0]


def _stored_verdict(backend: Backend, checkpoint: Checkpoint, family: str | None) -> EngineVerdict:
    config, quantization = checkpoint.config, checkpoint.quantization
    unread = checkpoint.problems[0].what if config is None and checkpoint.problems else None
    found = rule(
        backend,
        heads=config,
        weights=None if quantization is None else quantization.format,
        unread=unread,
        family=family,
        layout=None if quantization is None else quantization.layout,
    )
    if found.verdict != "served" or not isinstance(backend, QuantizedDrafterBackend):
        return found
    return next(map(_of_problem, backend.storage_problems(checkpoint)), found)


def _of_problem(problem: Problem) -> EngineVerdict:
    if CONVERT in problem.do:
        return EngineVerdict(verdict="after convert", why=f"{problem.what}; {problem.do}")
    return EngineVerdict(verdict="refused", why=problem.what)


def published_family(name: str) -> str | None:
    """`model_type` of the target that a published or bundled drafter is for; None = it is not known."""
    drafter = catalogued_drafter(name)
    return None if drafter is None else _target_family(drafter)


def _target_family(drafter: CataloguedDrafter) -> str | None:
    if drafter.target == ALIAS:
        return read_target_shape(target_described(ALIAS)).model_type
    return known.family if (known := catalogued_target(drafter.target)) else None


def verdict(backend: Backend, drafter: CataloguedDrafter) -> EngineVerdict:
    """The verdict of an installed backend: the row's, unless the installed release lacks what newer ones serve."""
    here = rule(
        backend,
        heads=drafter.heads,
        weights=drafter.weights,
        layout=drafter.layout,
        unread=drafter.unread,
        family=_target_family(drafter),
    )
    row = drafter.engines.get(backend.name)
    return here if row is None or (row.verdict == "served" and here.verdict in ("refused", "after convert")) else row

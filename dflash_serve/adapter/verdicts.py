"""The one rule of which engine serves which published drafter: by its parts, its weights and its target's family."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from dflash_serve.adapter.protocol import Backend
from dflash_serve.checkpoint.catalogue import CataloguedDrafter, EngineVerdict, catalogued_target
from dflash_serve.checkpoint.config import Heads
from dflash_serve.errors import Problem

PLAIN = ("bf16", "fp16", "fp32")
CONVERT = "dflash-serve convert"  # In the remedy of a problem that `convert` mends


@runtime_checkable
class QuantizedDrafterBackend(Protocol):
    """A backend whose engine serves quantised drafters through dflash-serve; others serve plain weights alone."""

    drafter_formats: Collection[str]
    drafter_layouts: Collection[str]
    """Quantisers whose layouts it loads; drafters in another one are served after `convert`."""


@runtime_checkable
class LimitedBackend(Protocol):
    """A backend whose engine runs some families of targets alone."""

    def target_problems(self, family: str) -> list[Problem]:
        """Reasons why it does not run a target of this family, the `model_type` of its config.json."""
        ...


def drafter_formats(backend: Backend) -> Collection[str]:
    """Formats of quantised drafters that a backend serves."""
    return backend.drafter_formats if isinstance(backend, QuantizedDrafterBackend) else ()


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
        layout: quantiser whose layout its weights have; None = not known, or plain weights.
    """
    if unread is not None:
        return EngineVerdict(verdict="refused", why=unread)
    if weights is not None and weights not in PLAIN and weights not in drafter_formats(backend):
        return EngineVerdict(verdict="refused", why=f"its weights are {weights}: only plain ones are served here")
    if isinstance(backend, LimitedBackend):
        if family is None:
            return EngineVerdict(verdict="not known", why="the family of its target is not known")
        if problems := backend.target_problems(family):
            return EngineVerdict(verdict="refused", why=problems[0].what)
    if heads is None:
        return EngineVerdict(verdict="not known", why="its config.json is not known")
    if not (problems := backend.head_problems(heads)):
        if (
            layout is not None
            and isinstance(backend, QuantizedDrafterBackend)
            and layout not in backend.drafter_layouts
        ):
            do = f"`{CONVERT} --layout {next(iter(backend.drafter_layouts))}` writes another"
            return EngineVerdict(verdict="after convert", why=f"its weights are in {layout}'s layout; {do}")
        return EngineVerdict(verdict="served")
    first = problems[0]
    if CONVERT in first.do:
        return EngineVerdict(verdict="after convert", why=f"{first.what}; {first.do}")
    return EngineVerdict(verdict="refused", why=first.what)


def verdict(backend: Backend, drafter: CataloguedDrafter) -> EngineVerdict:
    """The verdict of an installed backend: the row's, unless the installed release lacks what newer ones serve."""
    family = known.family if (known := catalogued_target(drafter.target)) else None
    here = rule(
        backend,
        heads=drafter.heads,
        weights=drafter.weights,
        unread=drafter.unread,
        family=family,
        layout=drafter.layout,
    )
    row = drafter.engines.get(backend.name)
    return here if row is None or (row.verdict == "served" and here.verdict in ("refused", "after convert")) else row

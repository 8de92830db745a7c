"""Controls for an acceptance figure: the same drafter, its features spoilt. A figure that survives them is no proof."""

from __future__ import annotations

from .engine import CONTROLS
from .faults.catalogue import catalogue
from .faults.fault import Fault
from .speculator import Speculator

__all__ = ["CONTROLS", "controls"]


def controls(speculator: Speculator) -> dict[str, Fault]:
    """The faults that `evaluate` shows beside every figure, by name."""
    faults = {fault.name: fault for fault in catalogue(speculator)}
    return {name: faults[name] for name in CONTROLS}

"""Step: one named piece of a build, and what running it gives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Measured = dict[str, object]


@dataclass(frozen=True)
class Work:
    """What a running step has at hand."""

    folder: Path
    """Empty; becomes its output when the step returns."""
    inputs: Mapping[str, Path]
    """Folders of its sources and of the steps it needs."""
    say: Callable[[str], None]
    """Shows what it is at."""


@dataclass(frozen=True)
class Step:
    """A pure function of its inputs, its parameters and the tools' versions."""

    name: str
    run: Callable[[Work], Measured]
    needs: tuple[str, ...]
    """Sources and steps."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    """Packages whose version matters to the output."""
    revision: int = 1
    """Counted up when the code of the step changes what it writes."""
    about: str = ""
    """A line for the plan."""

    def tool_versions(self) -> dict[str, str]:
        """Package -> version; `absent` where it is not installed."""
        return {tool: _version(tool) for tool in self.tools}

    def key(self, inputs: Mapping[str, str]) -> str:
        """Digest of all that determines the output; `inputs` are digests by name."""
        parts = [self.name, self.revision, dict(self.parameters), self.tool_versions(), dict(inputs)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"

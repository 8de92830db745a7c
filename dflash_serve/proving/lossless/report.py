"""The signed-off report: what was compared, how, by which versions, and a digest over all of it. No secrets."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.common.frozen import Frozen
from dflash_serve.errors import UserError
from dflash_serve.proving.lossless.findings import Findings
from dflash_serve.proving.lossless.plan import LOOKS, NOISE, Plan

PACKAGES = ("dflash-serve", "torch", "transformers", "sglang", "tensorrt-llm", "vllm", "numpy")


class Report(Frozen):
    """A verification as it is kept."""

    date: str
    """UTC, ISO 8601."""
    versions: Mapping[str, str]
    """Of what is installed here; a server elsewhere does not tell."""
    sides: Mapping[str, Mapping[str, str | None]]
    plan: Plan
    noise: float
    """Largest gap in nats that counts as a near-tie."""
    looks: tuple[float, ...] = LOOKS
    findings: Findings
    sha256: str = ""
    """Of the report's canonical JSON (sorted keys, no spaces) without this field."""

    def signed(self) -> Report:
        """The same with its digest."""
        return self.model_copy(update={"sha256": self._digest()})

    def is_intact(self) -> bool:
        """Whether nothing in it was changed since it was signed."""
        return self.sha256 == self._digest()

    def _digest(self) -> str:
        content = self.model_dump(mode="json", exclude={"sha256"})
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def report_of(plan: Plan, sides: Mapping[str, Mapping[str, str | None]], findings: Findings) -> Report:
    """A signed report of now and here."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(date=now, versions=_versions(), sides=sides, plan=plan, noise=NOISE[plan.dtype], findings=findings)
    return report.signed()


def write_report(report: Report, path: Path) -> None:
    """Writes JSON, whole or not at all.

    Raises:
        UserError: the folder cannot be written.
    """
    partial = path.with_name(path.name + f".{os.getpid()}.tmp")
    try:
        partial.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", where=str(path), do="name another --output") from None


def read_report(path: Path) -> Report:
    """A report that is as it was signed.

    Raises:
        UserError: it cannot be read, or was changed.
    """
    try:
        report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        raise UserError("cannot be read as a report of verify", where=str(path)) from None
    if not report.is_intact():
        raise UserError("was changed after it was signed (sha256 differs)", where=str(path), do="verify again")
    return report


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": sys.platform}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

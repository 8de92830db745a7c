"""Which TensorRT-LLM it is, and what that release can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from importlib.metadata import PackageNotFoundError, version

from dflash_serve.errors import UserError

_FINAL = 10_000
"""Orders a final release after its candidates."""


@total_ordering
@dataclass(frozen=True, eq=True)
class Release:
    """A release by number; `candidate` is the n of rcn, None for a final one."""

    major: int
    minor: int
    candidate: int | None = None

    @classmethod
    def parse(cls, text: str) -> Release:
        """From a version such as 1.4, 1.3.0rc27 or 1.4.0rc1.post1.

        Raises:
            UserError: it is no version.
        """
        found = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(?:rc(\d+))?", text)
        if found is None:
            raise UserError(f"{text!r} is no version", where="TensorRT-LLM", do="give one such as 1.4.0rc1")
        major, minor, candidate = found.groups()
        return cls(int(major), int(minor), int(candidate) if candidate else None)

    def _order(self) -> tuple[int, int, int]:
        return self.major, self.minor, _FINAL if self.candidate is None else self.candidate

    def __lt__(self, other: Release) -> bool:
        return self._order() < other._order()

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}" + ("" if self.candidate is None else f".0rc{self.candidate}")

    @property
    def has_dflash(self) -> bool:
        """DFlash came with PR #12794, between 1.3.0rc13 and rc14."""
        return self >= FIRST

    @property
    def takes_plug_in(self) -> bool:
        """`register_draft_model` is on main @e27249f; the first release that has it was not seen, 1.4 is after it."""
        return self >= Release(1, 4, 0)

    @property
    def attention_backends(self) -> tuple[str, ...]:
        """FA4 came with PR #18553; the reference pages of 1.3.0rc27 and 1.4.0rc1 list it."""
        return ("VANILLA", "TRTLLM", "FA4") if self >= Release(1, 3, 27) else ("VANILLA", "TRTLLM")

    @property
    def checks_budget(self) -> bool:
        """1.4 refuses a context arena that does not fit (test_dflash_config_budget.py @414ba69); 1.3 dies of it."""
        return self >= Release(1, 4, 0)


FIRST = Release(1, 3, 14)
NEWEST = Release(1, 4)
"""The newest whose sources were read."""


def installed_release() -> Release:
    """That of the installed package; the newest we know where there is none (configuration for another machine)."""
    try:
        return Release.parse(version("tensorrt_llm"))
    except PackageNotFoundError:
        return NEWEST

"""Features of each TensorRT-LLM release: one table for checks, memory, config.yaml and plug-in.

A feature's first release is the first for which there is evidence: a reference page, or a merge while trunk bore that
number (trunk became rc24 on 30 July 2026, #17070, and rc25 on 10 August, #17481). Too late costs speed, too early a
release that rejects our YAML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from dflash_serve.errors import UserError

FINAL = 10_000  # comes after all candidates


@dataclass(frozen=True, order=True)
class Release:
    """A release by number; `candidate` is the n of rcn, FINAL for a final one."""

    major: int
    minor: int
    candidate: int = FINAL

    @classmethod
    def parse(cls, text: str) -> Release:
        """Reads a version such as 1.4, 1.3.0rc27 or 1.4.0rc1.post1.

        Raises:
            UserError: the text is no version.
        """
        found = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(?:rc(\d+))?", text)
        if found is None:
            raise UserError(f"{text!r} is no version", where="TensorRT-LLM", do="give one such as 1.4.0rc1")
        major, minor, candidate = found.groups()
        return cls(int(major), int(minor), int(candidate) if candidate else FINAL)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}" + ("" if self.candidate == FINAL else f".0rc{self.candidate}")

    def has(self, feature: Feature) -> bool:
        """This release has a feature of the table."""
        return feature.since is not None and self >= feature.since

    @property
    def attention_backends(self) -> tuple[str, ...]:
        """Kernels of the drafter's attention; VANILLA alone was there before the key was."""
        extra = {"TRTLLM": TRTLLM_ATTENTION, "FA4": FA4_ATTENTION}
        return ("VANILLA", *(name for name, feature in extra.items() if self.has(feature)))


@dataclass(frozen=True)
class Feature:
    """Something that TensorRT-LLM has from a release on."""

    since: Release | None  # None = in no release that was read
    source: str  # pull requests, and pages that show it


DFLASH = Feature(Release(1, 3, 14), "#12794, between rc13 and rc14")
DRAFT_LEN_SCHEDULE = Feature(
    Release(1, 3, 22), "#12262, merged 4 July (rc22: 22 July); before, DFlash silently ignored the key"
)
TRTLLM_ATTENTION = Feature(Release(1, 3, 25), "#16914, in review until 4 August; it brought `attention_backend` itself")
FA4_ATTENTION = Feature(Release(1, 3, 27), "#18553; reference page of 1.3.0rc27")
DRAFTER_FROM_OUTSIDE = Feature(Release(1, 4, 0), "`register_draft_model` #18043, handed to workers #18284")
CONTEXT_IN_POOL = Feature(
    Release(1, 4, 0),
    "#18343: with TRTLLM attention the draft K/V manager's pages hold the context, not an arena beside it",
)
BUDGET_CHECK = Feature(
    Release(1, 4, 0),
    "#19466: an arena that does not fit is refused (VANILLA, FA4); reference page of 1.4.0rc1, not of rc27",
)
RECOMPUTE_TAIL = Feature(Release(1, 4, 0), "reference page of 1.4.0rc1 (context_recompute_tail), absent in 1.3.0rc27")
TWO_SIDED_WINDOWS = Feature(Release(1, 4, 0), "`use_swa`, modeling_dflash.py @7c7504c; not with TRTLLM attention")
OWN_MASK_ROW = Feature(None, "`mask_token_embedding`, on main's worker of Kimi-K3 only")
QUANTISED_CONTEXT = Feature(None, "no pull request found; vLLM's counterpart is vllm #53122")
NEWEST = Release(1, 4)  # the newest whose sources were read


def installed_release() -> Release:
    """The installed package's release; where there is none, the newest we know (configuration for another machine)."""
    try:
        return Release.parse(version("tensorrt_llm"))
    except PackageNotFoundError:
        return NEWEST

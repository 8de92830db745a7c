"""EAGLE-3 and MTP, as TensorRT-LLM runs them beside DFlash: `Eagle3DecodingConfig` and `MTPDecodingConfig` by the
reference pages of 1.3.0rc27 and 1.4.0rc1; read, not run."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from dflash_serve.checkpoint.target import TargetLayout
from dflash_serve.draft_method import Eagle3Head
from dflash_serve.errors import Problem

from .releases import MTP_DRAFT_LEN, Release
from .upstream import why_no_drafter

DRAFTING = ("speculative_config",)
"""The key of config.yaml that makes TensorRT-LLM draft."""


def method_problems(target: TargetLayout, head: Eagle3Head | None, release: Release) -> Iterator[Problem]:
    """A target that makes no drafter, a head in another form, a release that reads the configuration otherwise."""
    why_none = why_no_drafter(target.shape.model_type)
    if why_none is not None:
        yield Problem(why_none, "target.model", "use another backend")
    if head is not None and "Speculator" in head.architecture:
        what = f"TensorRT-LLM does not read speculators' form of EAGLE-3 ({head.architecture})"
        yield Problem(what, head.checkpoint, "use a head in another form, or --backend vllm")
    if head is None and not release.has(MTP_DRAFT_LEN):
        what = f"TensorRT-LLM {release} may take max_draft_len otherwise for MTP; read was {MTP_DRAFT_LEN.since}"
        yield Problem(what, "--variants mtp", f"install {MTP_DRAFT_LEN.since} or later")


def method_arguments(head: Eagle3Head | None, draft_tokens: int) -> dict[str, JsonValue]:
    """`speculative_config`; acceptance is exact by default (no relaxed one, no trees)."""
    if head is None:
        return {"speculative_config": {"decoding_type": "MTP", "max_draft_len": draft_tokens}}
    eagle3: dict[str, JsonValue] = {"decoding_type": "Eagle3", "max_draft_len": draft_tokens}
    return {"speculative_config": {**eagle3, "speculative_model": head.checkpoint}}

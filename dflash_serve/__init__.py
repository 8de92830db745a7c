"""dflash-serve: one DFlash drafter, every engine.

Exports are lazy (PEP 562): importing this package must not import torch, so that `--help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_serve.answers.engine import Chunk, RequestOutput
    from dflash_serve.answers.llm import LLM
    from dflash_serve.checkpoint.config import DrafterConfig
    from dflash_serve.deployment.description import Deployment
    from dflash_serve.errors import UserError
    from dflash_serve.models.drafter import Drafter
    from dflash_serve.speculation.params import SamplingParams

__version__ = "0.3.0"

_HOMES = {
    "Chunk": "answers.engine",
    "Deployment": "deployment.description",
    "Drafter": "models.drafter",
    "DrafterConfig": "checkpoint.config",
    "LLM": "answers.llm",
    "RequestOutput": "answers.engine",
    "SamplingParams": "speculation.params",
    "UserError": "errors",
}

__all__ = ["LLM", "Chunk", "Deployment", "Drafter", "DrafterConfig", "RequestOutput", "SamplingParams", "UserError"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Faults of one rank on purpose, for a server that must start all the same."""

from __future__ import annotations

import os
from typing import Any

FAULT = "SGLANG_CPU_FAULT"
"""`memory:1`: rank 1 is short of memory when widths are made; `width 2:1`: its attention of width 2 cannot be made."""
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
ATTENTION = "sglang.srt.model_executor.model_runner.ModelRunner._get_attention_backend"


def install() -> None:
    """Does nothing unless the variable asks for a fault."""
    if FAULT in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(CREATE_WORKER, _short_of_memory, HookType.AROUND)
        HookRegistry.register(ATTENTION, _cannot_be_made, HookType.AROUND)


def _asked() -> str | None:
    """The fault of this rank."""
    from sglang.srt.runtime_context import get_parallel

    what, rank = os.environ[FAULT].split(":")
    return what if get_parallel().tp_rank == int(rank) else None


def _short_of_memory(create: Any, *args: Any) -> Any:
    if _asked() == "memory":
        from dflash_sglang.plugin import startup

        startup.free_gb = lambda worker: 0.1
    return create(*args)


def _cannot_be_made(make: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.runtime_context import get_spec

    if _asked() == f"width {get_spec().speculative_num_draft_tokens}":
        raise MemoryError("no memory for this width")
    return make(*args, **kwargs)

"""Halves of a disaggregated pair on a CPU: NIXL moves K/V in host memory, and there are no CUDA events to wait for."""

from __future__ import annotations

from typing import Any

import torch

from .kernels import Event

MANAGER = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
WITH_MEMORY_KIND = ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")
"""Methods of a NIXL agent that are told the kind of memory."""


def install() -> None:
    """Does nothing until a half is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(MANAGER, _on_host, HookType.AROUND)


def _on_host(build: Any, *args: Any, **kwargs: Any) -> None:
    from nixl._api import nixl_agent

    setattr(torch.cuda, "Event", Event)  # noqa: B010 - disaggregation/prefill.py takes CUDA's, whatever the device is
    for name in WITH_MEMORY_KIND:
        setattr(nixl_agent, name, _in_host_memory(getattr(nixl_agent, name)))
    build(*args, **kwargs)


def _in_host_memory(method: Any) -> Any:
    # SGLang calls all K/V memory VRAM; UCX without CUDA has host memory alone, and refuses that name
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*map(_kind, args), **{name: _kind(value) for name, value in kwargs.items()})

    return call


def _kind(word: Any) -> Any:
    return "DRAM" if isinstance(word, str) and word == "VRAM" else word

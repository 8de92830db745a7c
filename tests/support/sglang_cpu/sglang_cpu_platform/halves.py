"""Halves of a disaggregated pair on a CPU: NIXL moves K/V in host memory, and there are no CUDA events to wait for."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .kernels import Event

MANAGER = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
WITH_MEMORY_KIND = ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")
"""Methods of a NIXL agent that are told the kind of memory."""
PAUSE_MICROSECONDS = 1000


def install() -> None:
    """Does nothing until a half is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(MANAGER, _on_host, HookType.AROUND)


def _on_host(build: Any, *args: Any, **kwargs: Any) -> None:
    from nixl._api import nixl_agent

    _pausing(sys.modules[nixl_agent.__module__].nixlBind)
    setattr(torch.cuda, "Event", Event)  # noqa: B010 - disaggregation/prefill.py takes CUDA's, whatever the device is
    for name in WITH_MEMORY_KIND:
        setattr(nixl_agent, name, _in_host_memory(getattr(nixl_agent, name)))
    build(*args, **kwargs)


def _pausing(bindings: Any) -> None:
    # NIXL lets its thread ask for news without a pause: each half would take one of two cores
    settings = bindings.nixlAgentConfig

    class Pausing(settings):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PAUSE_MICROSECONDS if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Pausing


def _in_host_memory(method: Any) -> Any:
    # SGLang calls all K/V memory VRAM; UCX without CUDA has host memory alone, and refuses that name
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*map(_kind, args), **{name: _kind(value) for name, value in kwargs.items()})

    return call


def _kind(word: Any) -> Any:
    return "DRAM" if isinstance(word, str) and word == "VRAM" else word

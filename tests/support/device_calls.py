"""Counts what a GPU would make the host wait for, on a CPU: calls by which PyTorch synchronises with a device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dflash_torch.model_runner import StaticPass

READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "masked_select"}


class DeviceCalls(TorchFunctionMode):
    """`waits`: the lines that wait; `calls`: PyTorch functions called, a captured pass counts as one."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        if _waits(getattr(func, "__name__", ""), args, kwargs or {}):
            frames = [frame for frame in traceback.extract_stack() if "dflash" in frame.filename]
            self.waits.append(" < ".join(f"{frame.name}: {frame.line}" for frame in frames[:-4:-1]))
        return func(*args, **(kwargs or {}))


def _waits(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    if name in READS:
        return True
    if name in ("tensor", "as_tensor"):  # pageable memory is copied to the device at once
        return kwargs.get("device") is not None
    if name == "to":
        devices = [each for each in (*args[1:], kwargs.get("device")) if isinstance(each, str | torch.device)]
        return bool(devices) and not kwargs.get("non_blocking")
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, list) or (isinstance(each, Tensor) and each.dtype == torch.bool) for each in index)
    return False


@contextmanager
def device_calls() -> Iterator[DeviceCalls]:
    """Counts while it is open. Passes that a GPU has captured are not looked into."""
    call, found = StaticPass.__call__, DeviceCalls()

    def captured(work: StaticPass, *inputs: Tensor) -> tuple[Tensor, ...]:
        found.calls += 1
        with torch._C.DisableTorchFunction():
            return call(work, *inputs)

    StaticPass.__call__ = captured  # type: ignore[method-assign, assignment]
    try:
        with found:
            yield found
    finally:
        StaticPass.__call__ = call  # type: ignore[method-assign]

"""Watches fake tensors on device "cuda" (`torch._subclasses.FakeTensorMode`) for what would make a step wait."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OnTheDevice(TorchDispatchMode):
    """Refuses whatever takes a tensor from the device to the host; `.item()` and the like are FakeTensorMode's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        came = [a for a in args if isinstance(a, Tensor)]
        if isinstance(out, Tensor) and out.device.type == "cpu" and any(a.device.type == "cuda" for a in came):
            raise AssertionError(f"{func} takes a tensor to the host")
        return out

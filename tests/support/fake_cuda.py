"""A device without data in the place of a GPU: shapes, dtypes and kernels' rules hold, and nothing can be read back.

PyTorch's "meta" device, for which operators check what they check for "cuda" (`_scaled_mm` its multiples of 16, too).
Fake tensors of device "cuda" would say more, but a CPU build cannot even index one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = "meta"
"""Stands for "cuda": `.item()`, `.tolist()` and `.cpu()` of its tensors raise, as a step would wait for them."""


class OnTheDevice(TorchDispatchMode):
    """Refuses operators that mix device and host, scalars and copies to the device aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor) and t.dim()]
        if len({t.device.type for t in given}) > 1 and "copy" not in str(func):
            raise AssertionError(f"{func} mixes tensors of host and device")
        return func(*args, **(kwargs or {}))

"""A GPU's host on a CPU: counts calls by which PyTorch waits for a device, and replays passes as a CUDA graph does."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_torch.model_runner import Fetched, StaticPass

# Operators that read the device, or bring numbers from the host: none may be in a graph.
HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "pin_memory")
READS = {
    "tolist",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cpu",
    "numpy",
    "nonzero",
    "masked_select",
    "bincount",
}


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


class Graph(TorchDispatchMode):
    """Records operators with their tensors; `replay` runs them again on what the same tensors hold by then."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in HOST), f"{func} needs the host"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for kept, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def capture_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static passes are recorded and replayed, and their outputs copied for the host, as on a GPU."""

    def capture(work: StaticPass) -> None:  # with its warm-up
        work.work(*work.inputs)
        graph = Graph()
        with graph:
            work.outputs = work.work(*work.inputs)
        work.graph = graph  # type: ignore[assignment]

    fetch = Fetched.__init__
    monkeypatch.setattr(Fetched, "__init__", lambda self, tensor: fetch(self, tensor.clone()))
    monkeypatch.setattr(StaticPass, "_capture", capture)
    monkeypatch.setattr(StaticPass, "captures", property(lambda _: True, lambda *_: None), raising=False)

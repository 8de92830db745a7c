"""A GPU's host on a CPU: counts calls by which PyTorch waits for a device, and replays passes as a CUDA graph does."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


class Pool:
    """Memory of CUDA graphs as PyTorch allots it: blocks of 512 bytes, the smallest free range that is large enough."""

    SIZE = 2**28  # bytes; the system allots pages that are written

    def __init__(self) -> None:
        self.memory = torch.zeros(self.SIZE, dtype=torch.uint8)
        self.free = [(0, self.SIZE)]  # addresses and sizes, in order
        self.held: dict[int, int] = {}

    def take(self, size: int) -> int:
        size = -(-size // 512) * 512
        place = min((n for n, (_, room) in enumerate(self.free) if room >= size), key=lambda n: self.free[n][::-1])
        address, room = self.free.pop(place)
        if room > size:
            self.free.insert(place, (address + size, room - size))
        self.held[address] = size
        return address

    def give_back(self, address: int) -> None:
        self.free.append((address, self.held.pop(address)))
        ranges = list[tuple[int, int]]()
        for first, size in sorted(self.free):
            if ranges and sum(ranges[-1]) == first:
                first, size = ranges[-1][0], ranges.pop()[1] + size
            ranges.append((first, size))
        self.free = ranges


class Graph(TorchDispatchMode):
    """A `torch.cuda.CUDAGraph` on a CPU: it records operators, and a replay runs them at the recorded addresses.

    What an operator makes while it is recorded has an address in the pool for as long as it lives then. Later records
    take the same address, so a replay overwrites what it still held. Recording changes no tensor, as on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.outputs: tuple[Tensor, ...] = ()  # while they live their addresses are taken
        self.addresses: dict[int, int] = {}  # by storage
        self.before: dict[int, tuple[Any, Any]] = {}  # storages from outside that it changed, and their contents

    def capture_begin(self, pool: Pool) -> None:
        self.pool = pool
        self.recording = ExitStack()
        self.recording.enter_context(self)

    def capture_end(self) -> None:
        self.recording.close()
        for storage, contents in self.before.values():
            storage.copy_(contents)
        self.before = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in HOST), f"{func} needs the host"
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        placed = tree_map(self.placed, (args, kwargs))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(kwargs[argument.name])
        out = func(*args, **kwargs)
        known = {_storage(each) for each in given}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and _storage(each) not in known | self.addresses.keys():
                self._place(each.untyped_storage())
        self.calls.append((func, *placed, tree_leaves(tree_map(self.placed, out))))
        return out

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.addresses and storage._cdata not in self.before:
            self.before[storage._cdata] = storage, storage.clone()

    def _place(self, storage: Any) -> None:
        if storage.nbytes():
            self.addresses[storage._cdata] = self.pool.take(storage.nbytes())
            # Without a reference to the graph, whose outputs would then never be freed.
            weakref.finalize(storage, _gone, self.pool, self.addresses, storage._cdata)

    def placed(self, value: Any) -> Any:
        """A tensor where it lies in the pool; other values, and tensors from outside, as they are."""
        if not isinstance(value, Tensor) or (address := self.addresses.get(_storage(value))) is None:
            return value
        memory = self.pool.memory[address:].view(value.dtype)
        return memory.as_strided(value.shape, value.stride(), memory.storage_offset() + value.storage_offset())

    def record(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Records a call that PyTorch does not see, as of a Triton kernel."""
        self.calls.append((work, *tree_map(self.placed, (args, kwargs)), [None]))

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            made = func(*args, **kwargs)
            for kept, new in zip(out, [made] if len(out) == 1 else tree_leaves(made), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def _gone(pool: Pool, addresses: dict[int, int], storage: int) -> None:
    pool.give_back(addresses.pop(storage))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def capture_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static passes are captured and replayed, and their outputs copied for the host, as on a GPU."""
    fetch, capture = Fetched.__init__, StaticPass._capture

    def captured(work: StaticPass) -> None:
        capture(work)
        graph = cast(Graph, work.graph)
        graph.outputs, work.outputs = work.outputs, tuple(map(graph.placed, work.outputs))

    cuda = {
        "CUDAGraph": Graph,
        "graph_pool_handle": Pool,
        "Stream": Mock,
        "current_stream": Mock,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda: None,
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Fetched, "__init__", lambda self, tensor: fetch(self, tensor.clone()))
    monkeypatch.setattr(StaticPass, "_capture", captured)
    monkeypatch.setattr(StaticPass, "captures", property(lambda _: True, lambda *_: None), raising=False)

"""Work of a fixed shape, done again and again: captured once in a CUDA graph and replayed, or just called on a CPU.

A decoding step is some hundred small kernels. Launched one by one they keep a GPU waiting for its host; as one graph
they are launched together. The capture itself was not run on a GPU yet; on a CPU the same work runs uncaptured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]
WARM_UP = 2
"""Calls before a capture: libraries set themselves up in the first, which must not be recorded."""


class StaticPass:
    """A function of tensors of fixed shapes.

    What it returns is overwritten by the next call.

    Args:
        work: reads the inputs it is called with, and tensors that stay where they are.
        inputs: examples; only their shapes, dtypes and device matter.
    """

    def __init__(self, work: Work, inputs: Sequence[Tensor]) -> None:
        self.work = work
        self.inputs = [torch.empty_like(tensor) for tensor in inputs]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept.copy_(given)
        if self.inputs[0].device.type != "cuda":
            return self.work(*self.inputs)
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        return self.outputs

    def _capture(self) -> None:
        """CUDA's rule: warm up on a stream of its own, then record what the work launches."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.work(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.work(*self.inputs)

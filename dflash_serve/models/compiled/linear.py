"""Linear layers over few rows, as fast as memory gives the weights; a row of a block comes out as it does alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_serve.models.compiled.build import kernel, load_kernels

LANES = 16
"""Outputs that the source keeps side by side."""
PER_WORD = {torch.float32: 1, torch.bfloat16: 2}
"""Inputs that it reads at once."""


class CompiledLinear(nn.Module):
    """x [rows, in] -> [rows, out], of the weights' dtype and contiguous. Inference only.

    Args:
        linear: on a CPU; what `compiled_linear` takes.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        library = load_kernels()
        assert library is not None
        weight, name = linear.weight.detach().contiguous(), str(linear.weight.dtype).removeprefix("torch.")
        self.outputs, self.inputs = weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()
        self.packed = weight.new_empty(-(-self.outputs // LANES) * LANES * self.inputs)
        kernel(library, f"pack_{name}", "ppll")(weight.data_ptr(), self.packed.data_ptr(), self.inputs, self.outputs)
        self._run = kernel(library, f"linear_{name}", "ppppllli")

    def __deepcopy__(self, memo: object) -> CompiledLinear:
        """Itself: its weights are never written."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.packed.dtype or x.shape[-1] != self.inputs:
            raise ValueError(f"rows of {x.shape[-1]} {x.dtype} for a layer of {self.inputs} {self.packed.dtype}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs)
        bias = None if self.bias is None else self.bias.data_ptr()
        rows, threads = x.numel() // self.inputs, torch.get_num_threads()
        self._run(x.data_ptr(), self.packed.data_ptr(), bias, out.data_ptr(), rows, self.inputs, self.outputs, threads)
        return out


def compiled_linear(linear: nn.Linear) -> CompiledLinear | None:
    """A CPU's layer in our layout, where it can be compiled.

    None elsewhere, for other dtypes, for inputs that fill no whole words, and in bfloat16 on a CPU with matrix units
    (AMX), which oneDNN uses and this does not.
    """
    dtype = linear.weight.dtype
    if dtype not in PER_WORD or linear.in_features % PER_WORD[dtype] or load_kernels() is None:
        return None
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return None
    return CompiledLinear(linear)

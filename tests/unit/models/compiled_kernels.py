"""Triton's compiler takes every kernel for GPUs that are not here; run by `test_triton_kernels`."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash_serve.models.triton_kernels import KERNELS

CAPABILITIES = {"A100": 80, "H100, H200": 90, "B200": 100}
ROTATED = {"heads": 6, "kv_heads": 2, "half": 48, "block": 64}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("_add_norm", {"adds": adds, "size": 5120, "block": 8192}) for adds in (True, False)),
    ("_silu_product", {"size": 1100, "block": 1024}),
    *(("_rotate_and_store", {"norms": norms, **ROTATED}) for norms in (True, False)),
]
NUMBERS = {"eps": "fp32", "entry_size": "i64", "capacity": "i32", "cos": "*fp32", "sin": "*fp32"}
PLACES = {"entries": "*i64", "positions": "*i64"}


@pytest.mark.parametrize("gpu", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "constants"), CASES)
def test_a_kernel_compiles(name: str, constants: dict[str, Any], dtype: str, gpu: str) -> None:
    types = dict.fromkeys(constants, "constexpr") | NUMBERS | PLACES
    signature = {each: types.get(each, f"*{dtype}") for each in KERNELS[name].arg_names}
    target = GPUTarget("cuda", CAPABILITIES[gpu], 32)
    assert triton.compile(ASTSource(KERNELS[name], signature, constants), target=target).asm["cubin"]

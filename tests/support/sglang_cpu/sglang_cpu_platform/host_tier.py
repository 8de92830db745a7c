"""HiCache on a CPU: the K/V of the device lie in host memory, too, and are copied there by PyTorch.

Use `--hicache-io-backend direct --hicache-mem-layout layer_first`; other layouts have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"


def install() -> None:
    """Does nothing until a host tier is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pin = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(pin, _nothing, HookType.REPLACE)
    HookRegistry.register(f"{POOL}.__init__", _with_copies, HookType.AROUND)


def _nothing(*_: Any, **__: Any) -> None:
    """Nothing is pinned."""


def _with_copies(build: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.mem_cache.pool_host import mha

    setattr(mha, "transfer_kv_direct", copy_entries)  # noqa: B010 - sgl_kernel has it for GPUs alone
    build(*args, **kwargs)


def copy_entries(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copies the K/V of entries, layer by layer."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices].view(-1, *destination.shape[1:])

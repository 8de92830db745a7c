"""A PyTorch-on-CPU platform for SGLang, by its official entry points (`sglang.srt.platforms`, `sglang.srt.plugins`)."""

import os

NAME = "torch_cpu"


def platform_class() -> str:
    """Where SGLang finds the platform."""
    return "sglang_cpu_platform.platform.TorchCpuPlatform"


def install() -> None:
    """Replaces the few kernels that have no CPU form. Does nothing unless SGLANG_PLATFORM asks for this platform.

    DFLASH_SERVE_TEST_KERNELS in the environment adds those of quantised products.
    """
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return
    from sglang_cpu_platform import (
        attention,
        eagle,
        faults,
        halves,
        host_tier,
        kernels,
        processes,
        recurrent,
        sampling,
        steps,
        widths,
    )

    attention.install()
    eagle.install()
    faults.install()
    halves.install()
    host_tier.install()
    kernels.install()
    processes.install()
    recurrent.install()
    sampling.install()
    steps.install()
    widths.install()
    if os.environ.get("DFLASH_SERVE_TEST_KERNELS"):
        import pytest

        from tests.support import sglang_kernels

        sglang_kernels.install(pytest.MonkeyPatch())

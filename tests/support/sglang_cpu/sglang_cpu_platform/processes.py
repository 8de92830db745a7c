"""Processes of a server as copies of its first one: SGLang imports itself once, not in three processes."""

import multiprocessing
import os
from typing import Any

ASKED = "SGLANG_CPU_FORK"


def install() -> None:
    """Has SGLang's processes forked where SGLang asks for new ones, if SGLANG_CPU_FORK is set.

    A GPU's driver does not allow it. Two thirds of a start on a CPU are imports; `tests/sglang/test_tiny_server.py`
    starts as users do.
    """
    if os.environ.get(ASKED):
        chosen = multiprocessing.set_start_method

        def set_start_method(method: str | None, force: bool = False) -> Any:
            return chosen("fork" if method == "spawn" else method, force)

        multiprocessing.set_start_method = set_start_method

"""DFLASH_SERVE takes exactly the arguments that DFLASH takes: SGLang's own resolution of the one serves the other.

SGLang hands a registered algorithm a stand-in for its arguments, but its own resolution wants the record itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RECORDS: list[Any] = []


@contextmanager
def being_resolved(server_args: Any) -> Iterator[None]:
    """Remembers the record while SGLang resolves it."""
    _RECORDS.append(server_args)
    try:
        yield
    finally:
        _RECORDS.pop()


def resolve_as_dflash(stand_in: Any) -> None:
    """Block size, steps, draft attention and the rest, as for DFLASH.

    Raises:
        ValueError: what SGLang refuses for DFLASH.
    """
    from sglang.srt.arg_groups.speculative_hook import _handle_dflash

    _handle_dflash(_RECORDS[-1] if _RECORDS else stand_in)

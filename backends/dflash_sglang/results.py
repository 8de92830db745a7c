"""What each verification came to, as SGLang itself settles it: one place to count, and to learn the widths from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Listener(Protocol):
    """Wants to know."""

    def verified(self, width: int, accepted: Sequence[tuple[str, int]]) -> None:
        """A step of `width` slots: request ids, and how many drafted tokens of each were accepted."""
        ...


_LISTENERS: list[Listener] = []


def listen(listener: Listener) -> None:
    """From now on."""
    _LISTENERS.append(listener)


def on_result(settle: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    """Around SGLang's own settling of a step. Counted are the requests it counts: neither retracted nor finished.

    (With overlapped scheduling a request may be verified once more after it has finished.)
    """
    live = [i for i, request in enumerate(batch.reqs) if not (request.is_retracted or request.finished())]
    settled = settle(processor, result, batch)
    accepted = [(str(batch.reqs[i].rid), result.num_correct_drafts_per_req_cpu[i]) for i in live]
    for listener in _LISTENERS:
        listener.verified(int(result.speculative_num_draft_tokens), accepted)
    return settled

"""Facts that a worker of NVIDIA Dynamo (1.6.1) tells about its engine: our counters, and the tokens of a draft.

Dynamo starts SGLang in its worker's process. Its page of metrics hands on names that begin with `sglang:` alone
(dynamo/sglang/publisher.py), and its planner reads the drafted tokens of a step from `speculative_num_steps`
(dynamo/sglang/capacity.py), which is 1 for a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from dflash_serve.adapter.counters import PREFIX
from dflash_sglang.settings import AUTO, asked_width

WORKER = "dynamo.sglang.publisher"
"""A module that is imported in a worker's process before its engine is built."""
SGLANG = "sglang:"


def hooks() -> Mapping[str, Callable[..., Any]]:
    """Hooks by the path of Dynamo's function; empty if this process is no worker of Dynamo's."""
    if WORKER not in sys.modules:
        return {}
    return {
        "dynamo.common.utils.prometheus.register_engine_metrics_callback": with_our_counters,
        "dynamo.sglang.capacity.get_spec_decode_runtime_data": with_drafted_tokens,
    }


def with_our_counters(
    register: Callable[..., None], *args: Any, metric_prefix_filters: list[str] | None = None, **kwargs: Any
) -> None:
    """Hands on our metrics where SGLang's are."""
    filters = metric_prefix_filters
    if filters is not None and SGLANG in filters:
        filters = [*filters, PREFIX]
    register(*args, metric_prefix_filters=filters, **kwargs)


def with_drafted_tokens(tell: Callable[[Any], dict[str, Any] | None], server_args: Any) -> dict[str, Any] | None:
    """Tells the drafted tokens that a step verifies; where widths change, those of a whole block."""
    told, width = tell(server_args), asked_width()
    if width is None or width == AUTO:
        width = server_args.speculative_num_draft_tokens
    return {**told, "nextn": width - 1} if told is not None and width else told

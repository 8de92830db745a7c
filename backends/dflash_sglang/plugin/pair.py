"""A decode half drafts only beside a prefill half that runs the drafter, too.

Both halves keep K/V of the drafter. What the prefill half stores of a prompt is sent with the target's; a prefill half
without the drafter sends none, the decode half drafts as if there were no prompt, and SGLang says nothing
(`decode_only_spec_dec` in disaggregation/nixl/conn.py). The decode half learns the prefill half's address with the
first request and asks it for its settings; where it finds no drafter, requests by way of it end with an error.

A request for several choices (`n`) is refused: SGLang gives all of them, and the request that fills the prefix cache
before them, the room of the first (managers/tokenizer_manager.py, `_handle_batch_request`), and none is answered.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from dflash_serve.errors import first_line

logger = logging.getLogger(__name__)
SECONDS = 5.0  # time limit of the question; SGLang's own for the same address
UNLIKE = (
    "dflash-serve: the prefill half at %s runs %s, this decode half %s: it would draft without the prompt and accept "
    "less; start both halves with the same drafter"
)
SEVERAL = (
    "dflash-serve: n is {n}, and the halves of a pair answer one choice a request: with more, SGLang lets all of them "
    "wait for the same K/V, and answers none; send {n} requests"
)
UNKNOWN = (
    "dflash-serve: the prefill half at %s does not tell whether it runs the drafter (%s); if not, this half accepts "
    "less than it could"
)

Waiting = dict[str, list[Any]]  # requests by the address of their prefill half


def beside_its_drafter(
    ensure: Callable[..., tuple[Waiting, list[Any]]], queue: Any, waiting: Waiting
) -> tuple[Waiting, list[Any]]:
    """Around `DecodePreallocQueue._ensure_prefill_info`: requests of a prefill half without the drafter are aborted.

    A prefill half that was refused is asked again by the next request.
    """
    manager, ours = queue.kv_manager, queue.scheduler.spec_algorithm.name
    new = [address for address in waiting if address not in manager.prefill_info_table]
    ready, remaining = ensure(queue, waiting)
    for address in new:
        if address not in ready:
            continue
        theirs = _algorithm(address, manager.prefill_info_table[address], ours)
        if theirs == ours:
            continue
        reason = UNLIKE % (address, theirs or "no drafter", ours)
        logger.error(reason)
        del manager.prefill_info_table[address]
        for request in ready.pop(address):
            if request.kv_receiver is not None:
                request.kv_receiver.abort()
                manager.record_failure(request.req.bootstrap_room, reason)
    return ready, remaining


def one_choice(handle: Callable[[Any], None], request: Any) -> None:
    """Around `GenerateReqInput._handle_parallel_sampling`: a request for several choices is answered with HTTP 400.

    Raises:
        ValueError: it is for several choices, and a router handed it to two halves.
    """
    handle(request)
    if request.parallel_sample_num > 1 and request.bootstrap_room is not None:
        raise ValueError(SEVERAL.format(n=request.parallel_sample_num))


def _algorithm(address: str, info: Any, ours: str) -> str | None:
    """The prefill half's `--speculative-algorithm`; None = it does not speculate. Where it does not tell: `ours`."""
    from sglang.srt.runtime_context import get_serving

    url = f"http://{address.rpartition(':')[0]}:{info.prefill_http_port}/server_info"
    key = get_serving().api_key
    request = Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=SECONDS) as page:
            found: str | None = json.load(page)["speculative_algorithm"]
            return found
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:  # no such page, or another one
        logger.warning(UNKNOWN, address, first_line(error))
        return ours

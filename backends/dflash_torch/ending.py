"""Where an answer ends: at a stop token, or where its grammar has nothing more to say."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request


def answer_length(request: Request, tokens: Sequence[int], eos_token_ids: Sequence[int]) -> int:
    """How many of a step's tokens belong to the answer, the stop token counted; notes on the request why it ends.

    The grammar advances with them; without it `ignore_eos` lets the answer go on behind an end-of-request token, with
    it nothing could follow.
    """
    grammar, stops = request.grammar, set(request.params.stop_token_ids)
    if grammar is not None or not request.params.ignore_eos:
        stops.update(eos_token_ids)
    for count, token in enumerate(tokens, start=1):
        if grammar is not None:
            grammar.advance(token)
            request.failure = grammar.failure
        if request.failure is not None:
            return 0
        if token in stops:
            request.stop_token = token
        if token in stops or (grammar is not None and grammar.finished):
            request.finish_reason = "stop"
            return count
    return len(tokens)

"""Where an answer ends: at a stop token, or where its grammar has nothing more to say."""

from __future__ import annotations

from collections.abc import Sequence as Many

from .sequence import Sequence


def answer_length(sequence: Sequence, tokens: Many[int], eos_token_ids: Many[int]) -> int:
    """How many of a step's tokens belong to the answer, the stop token counted; notes on the sequence why it ends.

    The grammar advances with them; without it `ignore_eos` lets the answer go on behind an end-of-sequence token, with
    it nothing could follow.
    """
    grammar, stops = sequence.grammar, set(sequence.params.stop_token_ids)
    if grammar is not None or not sequence.params.ignore_eos:
        stops.update(eos_token_ids)
    for count, token in enumerate(tokens, start=1):
        if grammar is not None:
            grammar.advance(token)
            sequence.failure = grammar.failure
        if sequence.failure is not None:
            return 0
        if token in stops:
            sequence.stop_token = token
        if token in stops or (grammar is not None and grammar.finished):
            sequence.finish_reason = "stop"
            return count
    return len(tokens)

"""One request's answer as it grows: the gains of a sequence in, chunks of text out."""

from __future__ import annotations

from tokenizers import Tokenizer

from dflash_serve.outputs import Chunk, RequestOutput, TokenLogprob

from .sequence import Sequence
from .text import TextStream
from .verdict import Gain


class Answer:
    """A sequence and the text it has given.

    Args:
        index: the caller's number for it; its chunks carry it.
    """

    def __init__(self, index: int, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.index, self.sequence = index, sequence
        self.stream = TextStream(tokenizer, sequence.params.stop)
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if sequence.params.logprobs is None else []

    def advance(self, gain: Gain) -> Chunk:
        """The chunk of one step; a stop string ends the answer at the token that completes it."""
        sequence = self.sequence
        before, stop = self.stream.fed, sequence.stop_token is not None
        text = self.stream.feed(gain.token_ids[:-1] if stop else gain.token_ids)
        if self.stream.stopped:
            gain = self._cut(gain, self.stream.fed - before)
        elif sequence.finish_reason is not None:
            text += self.stream.flush()
        self.text += text
        if self.logprobs is not None:
            self.logprobs += gain.logprobs or []
        return Chunk(self.index, text, gain.token_ids, sequence.finish_reason, gain.logprobs)

    def _cut(self, gain: Gain, count: int) -> Gain:
        self.sequence.cut(len(gain.token_ids) - count)
        self.sequence.finish_reason, self.sequence.stop_token = "stop", None
        return gain.first(count)

    def output(self) -> RequestOutput:
        """The finished request."""
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return RequestOutput(
            prompt_token_ids=sequence.token_ids[: sequence.prompt_length],
            token_ids=sequence.output_ids,
            text=self.text,
            finish_reason=sequence.finish_reason,
            statistics=sequence.statistics,
            logprobs=self.logprobs,
        )

"""One request's answer as it grows: the results of a request in, chunks of text out."""

from __future__ import annotations

from tokenizers import Tokenizer

from dflash_serve.outputs import Chunk, RequestOutput, TokenLogprob

from .detokenizer import Detokenizer
from .request import Request
from .sampler import StepResult


class Answer:
    """A request and the text it has given.

    Args:
        index: the caller's number for it; its chunks carry it.
    """

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        self.index, self.request = index, request
        self.stream = Detokenizer(tokenizer, request.params.stop)
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []

    def advance(self, result: StepResult) -> Chunk:
        """The chunk of one step; a stop string ends the answer at the token that completes it."""
        request = self.request
        before, stop = self.stream.fed, request.stop_token is not None
        text = self.stream.feed(result.token_ids[:-1] if stop else result.token_ids)
        if self.stream.stopped:
            result = self._cut(result, self.stream.fed - before)
        elif request.finish_reason is not None:
            text += self.stream.flush()
        self.text += text
        if self.logprobs is not None:
            self.logprobs += result.logprobs or []
        return Chunk(self.index, text, result.token_ids, request.finish_reason, result.logprobs)

    def _cut(self, result: StepResult, count: int) -> StepResult:
        self.request.cut(len(result.token_ids) - count)
        self.request.finish_reason, self.request.stop_token = "stop", None
        return result.first(count)

    def output(self) -> RequestOutput:
        """The finished request."""
        request = self.request
        assert request.finish_reason is not None
        return RequestOutput(
            prompt_token_ids=request.token_ids[: request.prompt_length],
            token_ids=request.output_ids,
            text=self.text,
            finish_reason=request.finish_reason,
            statistics=request.statistics,
            logprobs=self.logprobs,
        )

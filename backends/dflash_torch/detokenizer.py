"""Token ids to text, streamed: never half a character, and never text that a stop string may yet take back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dflash_serve.outputs import Chunk, RequestOutput, TokenLogprob

from .request import Request
from .sampler import StepResult

INVALID_PREFIX = "Invalid prefix encountered"
"""What tokenizers says where the text of some tokens does not begin with that of fewer."""


class Detokenizer:
    """The text of one answer as its tokens arrive.

    Args:
        prompt: what the answer goes on from: whether its first word begins with a space hangs on that.
        stop: the answer ends before the first occurrence of any of these, wherever tokens cut it.
        min_tokens: no stop string is looked for in the text of the first ones.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self.stop, self.min_tokens = tuple(stop), min_tokens
        self.held = ""
        self.stopped = False
        self.fed = 0
        """Tokens taken in so far; those behind a complete stop string are not."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens; sets `stopped` once a stop string is complete."""
        before = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.fed += 1
            self.held += self._decode(token_id)
            if self.fed <= self.min_tokens:
                before, self.held = before + self.held, ""
            self._cut_at_stop()
        safe = len(self.held) if self.stopped else len(self.held) - self._could_be_stop()
        text, self.held = self.held[:safe], "" if self.stopped else self.held[safe:]
        return before + text

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        text, self.held = self.held, ""
        return text

    def _decode(self, token_id: int) -> str:
        try:
            return self.decoder.step(self.tokenizer, token_id) or ""
        except Exception as error:  # tokenizers raises nothing narrower
            if INVALID_PREFIX not in str(error):
                raise
            # Bytes that are no character, and then a word: what came is lost, what comes is not (as vLLM does it).
            self.decoder = DecodeStream(skip_special_tokens=True)
            return self.decoder.step(self.tokenizer, token_id) or ""

    def _cut_at_stop(self) -> None:
        found = [at for at in (self.held.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.held, self.stopped = self.held[: min(found)], True

    def _could_be_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for length in range(min(longest, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-length:]) for stop in self.stop):
                return length
        return 0


class Answer:
    """One request's answer as it grows: its step results in, chunks of text out.

    Args:
        index: the caller's number for it; its chunks carry it.
    """

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        self.index, self.request = index, request
        prompt, params = request.token_ids[: request.prompt_length], request.params
        self.detokenizer = Detokenizer(tokenizer, prompt, params.stop, min_tokens=params.min_tokens)
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []

    def advance(self, result: StepResult) -> Chunk:
        """The chunk of one step; a stop string ends the answer at the token that completes it."""
        request = self.request
        before, stop = self.detokenizer.fed, request.stop_token is not None
        text = self.detokenizer.feed(result.token_ids[:-1] if stop else result.token_ids)
        if self.detokenizer.stopped:
            result = self._cut(result, self.detokenizer.fed - before)
        elif request.finish_reason is not None:
            text += self.detokenizer.flush()
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

"""The answer to one prompt: its request in the scheduler, and its text as tokens arrive.

Streamed text has whole characters only, and no text that may turn out to be part of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dflash_serve.answers.engine import Chunk, RequestOutput, TokenLogprob
from dflash_serve.speculation.params import SamplingParams

from .grammar import Grammar
from .request import Request, StepResult
from .scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# tokenizers' message where the text of some tokens does not begin with the text of fewer of them.
INVALID_PREFIX = "Invalid prefix encountered"


class Detokenizer:
    """The text of one answer as its tokens arrive.

    Args:
        prompt: the tokens before the answer; they decide whether its first word begins with a space.
        stop: the answer ends before the first occurrence of any of these, wherever tokens cut it.
        min_tokens: stop strings that end within the first `min_tokens` tokens do not count.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self.stop, self.min_tokens = tuple(stop), min_tokens
        self.held = ""
        self.stopped = False
        self.fed = 0  # tokens taken in so far, without those behind a complete stop string

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens; sets `stopped` once a stop string is complete."""
        before = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.fed += 1
            self.held += self._decode(token_id)
            if self.fed <= self.min_tokens:  # a stop string may begin here, and end behind them
                safe = len(self.held) - could_begin(self.stop, self.held)
                before, self.held = before + self.held[:safe], self.held[safe:]
            else:
                self._cut_at_stop()
        safe = len(self.held) - (0 if self.stopped else could_begin(self.stop, self.held))
        text, self.held = self.held[:safe], "" if self.stopped else self.held[safe:]
        return before + text

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        text, self.held = self.held, ""
        return text

    def _decode(self, token_id: int) -> str:
        try:
            return self.decoder.step(self.tokenizer, token_id) or ""
        except Exception as error:  # tokenizers raises nothing narrower
            if INVALID_PREFIX not in str(error):
                raise
            # Bytes that are no character, then a word: these bytes are lost, later text is not (as in vLLM).
            self.decoder = DecodeStream(skip_special_tokens=True)
            return self.decoder.step(self.tokenizer, token_id) or ""

    def _cut_at_stop(self) -> None:
        found = [at for at in (self.held.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.held, self.stopped = self.held[: min(found)], True


def could_begin(markers: Sequence[str], text: str) -> int:
    """Length of the longest end of a text that is the beginning of a marker, and not a whole one."""
    longest = max(map(len, markers), default=1) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next((n for n in ends if any(n < len(marker) and marker.startswith(text[-n:]) for marker in markers)), 0)


class StepFailedError(RuntimeError):
    """A step of the engine failed; the requests that ran in it have ended. Its cause is the step's exception."""


class AnswerFailedError(RuntimeError):
    """An answer could not be generated, by no fault of its request."""


Item = Chunk | Exception | None
"""News of an answer: a chunk; the exception that ended it (a UserError where the request is at fault); None = it was
cancelled and has left."""


class PendingAnswer:
    """The answer to one prompt, from its submission to its end.

    Args:
        index: the caller's number for it; its chunks carry it.
        token_ids: a prompt that `Scheduler.check` accepts.
        deliver: called in the loop's thread with every item of news. A chunk with a finish_reason, an exception or None
            is the last.
        grammar: the grammar that it must match, unused so far.
        salt: only answers of the same salt share prefixes.
        group: answers of one group wait for each other's prefill where they can reuse it; None = no group.
    """

    def __init__(
        self,
        index: int,
        token_ids: list[int],
        params: SamplingParams,
        deliver: Callable[[PendingAnswer, Item], None],
        *,
        grammar: Grammar | None = None,
        salt: str = "",
        group: object | None = None,
    ) -> None:
        self.index, self.token_ids, self.params, self.deliver = index, token_ids, params, deliver
        self.grammar, self.salt, self.group = grammar, salt, group
        self.cancelled = False  # any thread may set it: the answer leaves before the next step
        self.arrived = monotonic()
        self.joined: float | None = None  # time at which it got a cache entry; None while it waits
        self.request: Request | None = None  # its request in the scheduler; None while it waits
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._detokenizer: Detokenizer | None = None

    def join(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> Request:
        """Gives it a request in the scheduler, which must have a free cache entry.

        Raises:
            UserError: as `Scheduler.check`.
        """
        params = self.params
        self._detokenizer = Detokenizer(
            tokenizer.backend_tokenizer, self.token_ids, params.stop, min_tokens=params.min_tokens
        )
        self.request = scheduler.join(self.token_ids, params, grammar=self.grammar, salt=self.salt)
        self.joined = monotonic()
        return self.request

    def advance(self, result: StepResult) -> Chunk:
        """The chunk of one step; a stop string ends the answer at the token that completes it."""
        request, detokenizer = result.request, self._detokenizer
        assert detokenizer is not None
        before, stop = detokenizer.fed, request.stop_token is not None
        text = detokenizer.feed(result.token_ids[:-1] if stop else result.token_ids)
        if detokenizer.stopped:
            count = detokenizer.fed - before
            request.cut(len(result.token_ids) - count)
            request.finish_reason, request.stop_token = "stop", None
            result = result.first(count)
        elif request.finish_reason is not None:
            text += detokenizer.flush()
        self.text += text
        if self.logprobs is not None:
            self.logprobs += result.logprobs or []
        return Chunk(self.index, text, result.token_ids, request.finish_reason, result.logprobs)

    def whole(self) -> Chunk:
        """All its chunks in one, once it has ended."""
        request = self.request
        assert request is not None
        return Chunk(self.index, self.text, request.output_ids, request.finish_reason, self.logprobs)

    def output(self) -> RequestOutput | None:
        """The finished request; None before its end, and where it failed."""
        request = self.request
        if request is None or request.finish_reason is None or request.failure is not None:
            return None
        return RequestOutput(
            prompt_token_ids=request.token_ids[: request.prompt_length],
            token_ids=request.output_ids,
            text=self.text,
            finish_reason=request.finish_reason,
            statistics=request.statistics,
            logprobs=self.logprobs,
            steps=request.steps,
        )

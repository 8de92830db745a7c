"""The target's answers to prompts, from the embedded engine or from a server of the target (vLLM, SGLang, ours)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from dflash_serve.answers.chat_template import encode_text, render_messages
from dflash_serve.answers.engine import Conversation, Engine, Stream
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_PERIOD, REPEATS, SHORTEST_TAIL = 24, 4, 24  # limits of a loop: see `repeated_tail`
LOOP_CHECK_EVERY = 16
SEEDS = 2**31  # every server takes smaller ones


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to continue."""

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass
class Completion:
    """A continued prompt. `ended`: by a stop token (kept, the last one); `looped`: cut because it repeated itself."""

    request: AnswerRequest
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    looped: bool = False


class AnswerServer:
    """A server that runs already, with the target's tokenizer.

    Args:
        at_once: requests in flight.
    """

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerBase, at_once: int) -> None:
        self.tokenizer, self.endpoint = tokenizer, Endpoint(url, concurrency=at_once, timeout=3600)

    def tokenize(self, prompt: Conversation) -> list[int]:
        """Token ids of a conversation, by the target's chat template.

        Raises:
            UserError: the template refuses it, or does not read one of its variables.
        """
        return encode_text(self.tokenizer, render_messages(self.tokenizer, prompt, prompt.variables), special=False)

    def ask(self, requests: Iterator[AnswerRequest], at_once: int) -> Iterator[Completion]:
        """Completions as they end; one that repeats itself is cut when it has ended."""
        running: set[Future[Completion]] = set()
        with ThreadPoolExecutor(at_once) as pool:
            try:
                while True:
                    running |= {pool.submit(self._answer, one) for one in islice(requests, at_once - len(running))}
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (one.result() for one in done)
            finally:
                pool.shutdown(cancel_futures=True)

    def _answer(self, request: AnswerRequest) -> Completion:
        seed = None if request.params.seed is None else request.params.seed % SEEDS
        reply = self.endpoint.complete(request.prompt, request.params.model_copy(update={"seed": seed}))
        if reply.token_ids is None:
            do = "use vLLM, SGLang or the embedded server, which return them"
            raise UserError("it returns no token ids", where=f"data.answers.server {self.endpoint.base}", do=do)
        completion = Completion(request, ended=reply.finish_reason == "stop")
        for first in range(0, len(reply.token_ids), LOOP_CHECK_EVERY):
            completion.tokens += reply.token_ids[first : first + LOOP_CHECK_EVERY]
            if cut_loop(completion):
                completion.ended = False
                break
        return completion


def ask(answering: Engine | AnswerServer, requests: Iterator[AnswerRequest], at_once: int) -> Iterator[Completion]:
    """Completions as they end, with up to `at_once` requests in the engine; one that repeats itself is cut."""
    if isinstance(answering, AnswerServer):
        return answering.ask(requests, at_once)
    return _ask_engine(answering, requests, at_once)


def _ask_engine(engine: Engine, requests: Iterator[AnswerRequest], at_once: int) -> Iterator[Completion]:
    running: list[tuple[Stream, Completion]] = []  # a stream each, so that one answer can be ended early
    while True:
        # Refilled some at a time: a prefill of one prompt costs nearly as much as one of many.
        if len(running) <= at_once - max(1, at_once // 16):
            for request in islice(requests, at_once - len(running)):
                running.append((engine.stream([request.prompt], [request.params]), Completion(request)))
        if not running:
            return
        going = []
        for stream, completion in running:
            if _goes_on(stream, completion):
                going.append((stream, completion))
            else:
                stream.close()
                yield completion
        running = going


def repeated_tail(tokens: Sequence[int]) -> int:
    """The shortest period n <= 24 with which the tail repeats, 0 if it does not.

    The rule: the last max(4n, 24) tokens are one n-gram over and over, i.e. each equals the token n before it.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        tail = max(REPEATS * period, SHORTEST_TAIL)
        if len(tokens) < tail:
            continue
        last = tokens[-tail:]
        if last[period:] == last[:-period]:
            return period
    return 0


def _goes_on(stream: Stream, completion: Completion) -> bool:  # False when the answer is complete
    chunk, tokens = next(stream), completion.tokens
    before = len(tokens)
    tokens += chunk.token_ids
    if chunk.finish_reason is not None:
        completion.ended = chunk.finish_reason == "stop"
        return False
    return before // LOOP_CHECK_EVERY == len(tokens) // LOOP_CHECK_EVERY or not cut_loop(completion)


def cut_loop(completion: Completion) -> bool:
    """Cuts a completion whose tail repeats itself; True if it did."""
    if period := repeated_tail(completion.tokens):
        completion.looped = True
        del completion.tokens[len(completion.tokens) - 2 * period :]
    return completion.looped

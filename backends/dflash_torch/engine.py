"""The embedded engine: prompts in, streamed text out, on this process's own device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_serve.backend import Prompt
from dflash_serve.errors import UserError
from dflash_serve.outputs import Chunk, RequestOutput
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth

from .detokenizer import Answer
from .sampler import StepResult
from .scheduler import Scheduler
from .speculator import Speculator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROLS = ("features shuffled", "features zeroed", "layer ids +1", "layer ids -1")
"""Names of faults (`faults.catalogue`) that no honest acceptance figure survives."""


@dataclass(eq=False)
class OutputQueue:
    """What the engine's steps have brought the requests of one stream."""

    unfinished: int
    """Requests of it that wait or run."""
    chunks: deque[Chunk] = field(default_factory=deque)
    """Those that the stream has not given yet."""
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """Finished requests by the index of their prompt."""
    failure: BaseException | None = None
    """What ended its requests, where a step of the engine failed."""
    failed: UserError | None = None
    """Why one of its requests ended without an output; the others go on."""
    closed: bool = False
    """Nobody listens: its requests are to be ended."""


@dataclass(frozen=True, eq=False)
class WaitingPrompt:
    """A prompt that waits for a free cache entry; its chunks go to `queue` and carry `index`."""

    queue: OutputQueue
    index: int
    token_ids: list[int]
    params: SamplingParams


class EngineStream:
    """The chunks of a few prompts as steps end, and their outputs; a `dflash_serve.backend.Stream`.

    Asking for the next chunk runs a step of the engine where none is there yet. A stream that is closed, or that
    nothing refers to any more, ends its own requests. A UserError at its end says that a request of it failed.
    """

    def __init__(self, engine: EmbeddedEngine, queue: OutputQueue) -> None:
        self._engine, self._queue = engine, queue
        self._finalizer = weakref.finalize(self, engine.end, queue)
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._queue.chunks:
            if self._queue.failure is not None:
                raise RuntimeError("a step of the engine failed, and this stream's requests with it") from (
                    self._queue.failure
                )
            if self._queue.closed or not self._queue.unfinished:
                raise self._queue.failed or StopIteration
            self._engine.step()
        return self._queue.chunks.popleft()

    def outputs(self) -> list[RequestOutput]:
        """The requests that have finished so far, in the order of the prompts."""
        return [self._queue.outputs[index] for index in sorted(self._queue.outputs)]

    def close(self) -> None:
        """Ends what still runs of it; its outputs stay."""
        self._finalizer()


class EmbeddedEngine:
    """Runs the prompts of any number of streams through a Scheduler; a `dflash_serve.backend.Engine`.

    As many requests run at once as its K/V cache has entries; the rest wait in the order in which they came.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> None:
        self.scheduler, self.tokenizer = scheduler, tokenizer
        self._waiting: deque[WaitingPrompt] = deque()
        self._answers: dict[int, tuple[OutputQueue, Answer]] = {}
        """Running requests by id, and where their chunks go."""
        self._in_step = False

    @property
    def dtype(self) -> str:
        """What it computes in: `float32` or `bfloat16`."""
        return str(self.scheduler.target.embedding.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self.scheduler.target.device.type

    @property
    def block_size(self) -> int | None:
        """B, the anchor counted; None = no speculation."""
        return self.scheduler.speculator.block_size if self.scheduler.speculator else None

    @property
    def controls(self) -> Sequence[str]:
        """Faults for `fixed` that every acceptance figure is to be held against; none without speculation."""
        return CONTROLS if self.scheduler.speculator else ()

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the target's own template.

        Raises:
            UserError: messages for a target without a template, or ones that it refuses.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not prompt or not isinstance(prompt[0], Mapping):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        try:
            encoded = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise what they like
            raise UserError(f"the target's chat template refuses them ({error})", where="messages") from None
        return list(encoded["input_ids"])

    def stream(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> EngineStream:
        """Queues the prompts; each ends with a chunk that has a finish_reason.

        Raises:
            UserError: a prompt that does not fit; none is queued then.
        """
        each = [(self.tokenize(prompt), param) for prompt, param in zip(prompts, params, strict=True)]
        for token_ids, param in each:
            self.scheduler.check(token_ids, param)
        queue = OutputQueue(unfinished=len(each))
        self._waiting += [WaitingPrompt(queue, index, ids, param) for index, (ids, param) in enumerate(each)]
        return EngineStream(self, queue)

    def step(self) -> None:
        """Admits waiting prompts while entries are free, runs one step, and queues its chunks for their streams.

        Raises:
            Exception: the step failed; all streams have ended with it.
        """
        self._drop_closed()
        self._in_step = True
        try:
            self._admit()
            for result in self.scheduler.step():
                self._deliver(result)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._in_step = False

    def end(self, queue: OutputQueue) -> None:
        """Ends the requests of one stream: now, or before the next step where a step is under way."""
        queue.closed = True
        queue.chunks.clear()
        if not self._in_step:
            self._drop_closed()

    def plain(self) -> EmbeddedEngine:
        """The same target without speculation, to compare with: no drafter, no features taken."""
        return self._with(None, FixedWidth(1))

    def fixed(self, width: int, fault: str | None = None) -> EmbeddedEngine:
        """The same target and drafter with K/V caches of its own, every step verifying `width` slots; no prefix reuse.

        Args:
            fault: a name from `faults.catalogue`: the drafter is fed wrongly on purpose. It changes drafts, no answer.

        Raises:
            UserError: the engine does not speculate, its blocks are smaller, or the pair knows no such fault.
        """
        if self.scheduler.speculator is None:
            raise UserError("without a drafter nothing is drafted", where="width", do="name a drafter")
        speculator = self.scheduler.speculator.twin()
        if not 1 <= width <= speculator.block_size:
            raise UserError(f"width {width}: blocks have 1 to {speculator.block_size} slots", where="width")
        if fault is not None:
            speculator = _faulty(speculator, fault)
        return self._with(speculator, FixedWidth(width), reuse_prefixes=False)

    def _with(
        self, speculator: Speculator | None, policy: FixedWidth, *, reuse_prefixes: bool = True
    ) -> EmbeddedEngine:
        full = self.scheduler
        scheduler = Scheduler(
            full.target,
            speculator,
            policy,
            max_batch_size=full.cache.entries,
            capacity=full.capacity,
            prefill_rows=full.prefill_rows,
            reuse_prefixes=reuse_prefixes,
        )
        return EmbeddedEngine(scheduler, self.tokenizer)

    def _admit(self) -> None:
        while self._waiting and self.scheduler.free_entries:
            first = self._waiting[0]
            request = self.scheduler.join(first.token_ids, first.params)
            self._answers[request.id] = first.queue, Answer(first.index, request, self.tokenizer.backend_tokenizer)
            self._waiting.popleft()

    def _deliver(self, result: StepResult) -> None:
        """Queues what one step brought one request; a stop string in its text ends it."""
        queue, answer = self._answers[result.request.id]
        chunk = answer.advance(result)
        if answer.detokenizer.stopped and result.request in self.scheduler.running:
            self.scheduler.leave(result.request)
        failure = result.request.failure
        if chunk.finish_reason is not None or failure is not None:
            del self._answers[result.request.id]
            queue.unfinished -= 1
        if failure is not None:
            do = "check the target's files, and hardware.dtype"
            queue.failed = UserError(failure, where=f"prompt {answer.index}", do=do)
        elif chunk.finish_reason is not None:
            queue.outputs[answer.index] = answer.output()
        if chunk.token_ids or chunk.finish_reason:
            queue.chunks.append(chunk)

    def _drop_closed(self) -> None:
        """Ends the requests of streams that were closed."""
        self._waiting = deque(prompt for prompt in self._waiting if not prompt.queue.closed)
        for queue, answer in list(self._answers.values()):
            if queue.closed:
                self._leave(answer)

    def _fail(self, error: BaseException) -> None:
        """Ends all requests: the K/V of those that ran may be half written."""
        for queue in [*(prompt.queue for prompt in self._waiting), *(queue for queue, _ in self._answers.values())]:
            queue.failure = error
        self._waiting.clear()
        for _, answer in list(self._answers.values()):
            self._leave(answer, sound=False)

    def _leave(self, answer: Answer, *, sound: bool = True) -> None:
        del self._answers[answer.request.id]
        if answer.request in self.scheduler.running:
            self.scheduler.leave(answer.request, sound=sound)


def _faulty(speculator: Speculator, name: str) -> Speculator:
    from .faults.catalogue import catalogue

    found = {fault.name: fault for fault in catalogue(speculator)}
    if name not in found:
        raise UserError(f"there is no {name!r}", where="fault", do=f"known for this pair: {', '.join(found)}")
    return found[name].change(speculator)

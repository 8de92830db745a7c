"""The embedded engine: prompts in, streamed text out, on this process's own device.

One loop (`EngineLoop`) serves `LLM` and the HTTP server. A caller submits `PendingAnswer`s; a step of the loop drops
cancelled answers, admits waiting ones, runs one step of the scheduler and delivers what it brought. `LLM` runs steps in
its own thread while it reads a stream; the server's `EngineWorker` runs them in its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from operator import index
from typing import TYPE_CHECKING, TypeVar

import torch

from dflash_serve.adapter.checks import uses_drafter
from dflash_serve.adapter.last_run import KeptWidth, LastRun
from dflash_serve.answers.chat_template import encode_text, render_messages
from dflash_serve.answers.engine import Chunk, Prompt, RequestOutput, template_variables
from dflash_serve.checkpoint.config import TransformerConfig
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.source import drafter_folder
from dflash_serve.common.progress import doing
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.variables import given_cost
from dflash_serve.errors import UserError, first_line
from dflash_serve.models.attention import PlainOperators, flashinfer_problem
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.loader import load_drafter, load_target, load_tokenizer
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth, WidthPolicy
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .answer import AnswerFailedError, Item, PendingAnswer, StepFailedError
from .calibration import choose_dtype, cost_of
from .launch import require_gpu
from .model_runner import sizes
from .request import KVCacheManager, StepResult
from .scheduler import Scheduler
from .speculator import Speculator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
T = TypeVar("T")

# Faults of `faults.kinds` used as negative controls: acceptance must drop under each.
CONTROLS = ("features shuffled", "features zeroed", "layer ids +1", "layer ids -1")


class EngineLoop:
    """The answers that wait for a cache entry and those that run. One thread at a time runs its steps.

    As many requests run at once as the K/V cache has entries; the others wait in order of arrival.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> None:
        self.scheduler, self.tokenizer = scheduler, tokenizer
        self.waiting: deque[PendingAnswer] = deque()
        self.running: dict[int, PendingAnswer] = {}  # running answers by the id of their request
        self.failed_steps = 0  # steps that have failed since the last good one
        self.calls: deque[Callable[[], None]] = deque()  # run before the next step, while none is in flight
        self.changed = threading.Condition()
        """Held while answers are added to or taken from `waiting`; notified by `submit`, `call` and `wake`."""
        self._stepping = threading.Lock()  # several threads may drive the loop, such as a server and a caller of `LLM`

    def submit(self, answers: Sequence[PendingAnswer]) -> None:
        """Adds answers to the queue, from any thread."""
        with self.changed:
            self.waiting.extend(answers)
            self.changed.notify()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Has work done between two steps, from any thread; answers in flight go on behind it."""
        done: Future[T] = Future()

        def call() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)

        with self.changed:
            self.calls.append(call)
            self.changed.notify()
        return done

    def wake(self) -> None:
        """Lets a thread that waits for `changed` look again: an answer was cancelled."""
        with self.changed:
            self.changed.notify()

    def step(self) -> None:
        """Drops cancelled answers, admits waiting ones, runs one step and delivers what it brought.

        A step that fails ends the answers that ran in it with a StepFailedError. Those that wait go on.
        """
        with self._stepping:
            self._drop_cancelled()
            if self.calls and self.running and self.scheduler.is_ahead:
                self._run(self.scheduler.settle)
            while self.calls:
                self.calls.popleft()()
            self._admit()
            if self.running:
                self._run(self.scheduler.step)

    def end(self, answers: Sequence[PendingAnswer]) -> None:
        """Cancels answers: they leave now, or before the next step if one is under way."""
        for answer in answers:
            answer.cancelled = True
        if self._stepping.acquire(blocking=False):
            try:
                self._drop_cancelled()
            finally:
                self._stepping.release()

    def fail(self, error: Exception, *, waiting: bool = False) -> None:
        """Ends all running answers, and those that wait if asked for. The K/V of the running ones is not reused."""
        failed = list(self.running.values())
        self.running.clear()
        for request in list(self.scheduler.running):
            self.scheduler.leave(request, sound=False)
        if waiting:
            with self.changed:
                failed += self.waiting
                self.waiting.clear()
        for answer in failed:
            answer.deliver(answer, error)

    def _run(self, step: Callable[[], list[StepResult]]) -> None:
        try:
            results = step()
        except BaseException as error:
            self.failed_steps += 1
            failure = StepFailedError("a step of the engine failed, and the requests that ran in it")
            failure.__cause__ = error
            self.fail(failure)
            if not isinstance(error, Exception):
                raise
            log.exception("a step failed, and the requests that ran in it")
            return
        self.failed_steps = 0
        for result in results:
            self._deliver(result)

    def _admit(self) -> None:
        # Without a free entry and a running answer, another engine has the entries: to join is an error then.
        while self.waiting and (self.scheduler.free_entries or not self.running):
            answer = self.waiting[0]
            if self._soon_reusable(answer):
                return
            try:
                request = answer.join(self.scheduler, self.tokenizer)
            except Exception as error:
                log.exception("a request could not join")
                self.waiting.popleft()
                answer.deliver(answer, error)
                continue
            self.running[request.id] = answer
            self.waiting.popleft()

    def _soon_reusable(self, answer: PendingAnswer) -> bool:  # a running answer of its group computes the same prompt
        if answer.group is None:
            return False
        siblings = [each.request for each in self.running.values() if each.group is answer.group and each.request]
        same = [each for each in siblings if each.token_ids[: each.prompt_length] == answer.token_ids]
        return bool(same) and not any(each.is_decoding for each in same)

    def _deliver(self, result: StepResult) -> None:
        request, answer = result.request, self.running[result.request.id]
        item: Item = None
        try:
            item = answer.advance(result)
        except Exception:
            log.exception("an answer could not be turned into text")
            request.failure = "the answer could not be turned into text"
        if request.failure is not None:
            grammar = request.grammar
            item = AnswerFailedError(request.failure)
            if grammar is not None and grammar.failure is not None:
                item = UserError(request.failure, where=grammar.where)
        if isinstance(item, Chunk) and item.finish_reason is None:
            if item.token_ids:
                answer.deliver(answer, item)
            return
        del self.running[request.id]
        if request in self.scheduler.running:  # after a stop string, which the scheduler does not know
            self.scheduler.leave(request)
        answer.deliver(answer, item)

    def _drop_cancelled(self) -> None:
        with self.changed:
            gone = [answer for answer in self.waiting if answer.cancelled]
            for answer in gone:
                self.waiting.remove(answer)
        for number, answer in list(self.running.items()):
            if answer.cancelled:
                del self.running[number]
                assert answer.request is not None
                self.scheduler.leave(answer.request)
                gone.append(answer)
        for answer in gone:
            answer.deliver(answer, None)


class EngineStream:
    """The chunks of a few prompts as steps end, and their outputs; a `dflash_serve.answers.engine.Stream`.

    Asking for the next chunk runs steps of the loop until there is one. A stream that is closed or deleted ends its own
    requests. A UserError at its end says that one of its requests failed.
    """

    def __init__(self, loop: EngineLoop, prompts: Sequence[tuple[list[int], SamplingParams]]) -> None:
        news: deque[tuple[PendingAnswer, Item]] = (
            deque()
        )  # refers to the answers, not to the stream, which can be deleted

        def deliver(answer: PendingAnswer, item: Item) -> None:
            news.append((answer, item))

        self.loop, self._news = loop, news
        self._answers = [PendingAnswer(index, ids, params, deliver) for index, (ids, params) in enumerate(prompts)]
        self._unfinished = len(self._answers)
        self._failed: Exception | None = None
        self._finalizer = weakref.finalize(self, loop.end, self._answers)
        self._finalizer.atexit = False
        loop.submit(self._answers)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while self._unfinished and self._finalizer.alive:
            if not self._news:
                self.loop.step()
                continue
            answer, item = self._news.popleft()
            if isinstance(item, Chunk):
                self._unfinished -= item.finish_reason is not None
                return item
            self._unfinished -= 1
            if isinstance(item, AnswerFailedError):
                do = "check the target's files, and hardware.dtype"
                self._failed = UserError(str(item), where=f"prompt {answer.index}", do=do)
            elif item is not None:
                self._failed = item
                self.close()
        raise self._failed or StopIteration

    def outputs(self) -> list[RequestOutput]:
        return [output for answer in self._answers if (output := answer.output()) is not None]

    def close(self) -> None:
        self._finalizer()


class EmbeddedEngine:
    """A target, and a drafter if it speculates, that answer prompts; a `dflash_serve.answers.engine.Engine`."""

    deployment: Deployment | None = None  # that it was started from, without open numbers

    def __init__(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> None:
        self.scheduler, self.tokenizer = scheduler, tokenizer
        self.loop = EngineLoop(scheduler, tokenizer)

    @property
    def dtype(self) -> str:
        return str(self.scheduler.target.embedding.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return self.scheduler.target.device.type

    @property
    def block_size(self) -> int | None:
        return self.scheduler.speculator.block_size if self.scheduler.speculator else None

    @property
    def controls(self) -> Sequence[str]:
        return CONTROLS if self.scheduler.speculator else ()

    def tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        try:
            if prompt and isinstance(prompt[0], Mapping):
                text = render_messages(self.tokenizer, prompt, template_variables(prompt))  # type: ignore[arg-type]
                return encode_text(self.tokenizer, text, special=False)
            return [index(token) for token in prompt]  # type: ignore[arg-type]
        except (TypeError, KeyError):
            raise UserError("neither text, nor token ids, nor chat messages", where="prompt") from None

    def stream(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> EngineStream:
        each = [(self.tokenize(prompt), param) for prompt, param in zip(prompts, params, strict=True)]
        for token_ids, param in each:
            self.scheduler.check(token_ids, param)
        return EngineStream(self.loop, each)

    def warm_up(self) -> None:
        """Generates one short answer and forgets it, so that slow or broken parts show before the first request."""
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        with doing("answering a first prompt"):
            list(self.stream([[0, 1]], [params]))
        self.scheduler.statistics = AcceptanceStatistics()
        self.scheduler.cache_manager.holds.clear()

    def plain(self) -> EmbeddedEngine:
        made = self._with(None, FixedWidth(1), self.scheduler.cache_manager.beside(reuse=True))
        made.scheduler.prepare()
        return made

    def fixed(self, width: int, fault: str | None = None) -> EmbeddedEngine:
        sound, change = self.scheduler.speculator, None
        if sound is None:
            raise UserError("without a drafter nothing is drafted", where="width", do="name a drafter")
        if not 1 <= width <= sound.block_size:
            raise UserError(f"width {width}: blocks have 1 to {sound.block_size} slots", where="width")
        if fault is not None:
            from .faults.kinds import drafter_faults

            changes = {each.name: each.change for each in drafter_faults(sound)}
            if fault not in changes:
                raise UserError(
                    f"there is no {fault!r}", where="fault", do=f"known for this pair: {', '.join(changes)}"
                )
            change = changes[fault]
        manager = self.scheduler.cache_manager.beside(reuse=False)
        speculator = sound.twin()
        made = self._with(change(speculator) if change else speculator, FixedWidth(width), manager)
        if change is None:
            made.scheduler.prepare()
        return made

    def _with(self, speculator: Speculator | None, policy: FixedWidth, manager: KVCacheManager) -> EmbeddedEngine:
        full = self.scheduler
        scheduler = Scheduler(
            full.target,
            speculator,
            policy,
            max_batch_size=full.cache.entries,
            capacity=full.capacity,
            prefill_rows=full.prefill_rows,
            shared=(full.cache, manager),
        )
        return EmbeddedEngine(scheduler, self.tokenizer)


def start_engine(deployment: Deployment, opened: Checkpoint | None = None) -> EmbeddedEngine:
    """Loads and starts a deployment whose `EmbeddedLaunch` has no problems, with a `limits.max_batch_size`.

    Args:
        opened: the drafter's files, where they are read already.
    """
    model, entries = deployment.target, deployment.limits.max_batch_size
    assert entries is not None
    require_gpu(deployment)
    device = "cuda" if deployment.hardware.gpu != "none" and torch.cuda.is_available() else "cpu"
    compiled, flashinfer = _operators(deployment)
    dtype = choose_dtype(deployment, device, compiled=compiled)
    if flashinfer and (problem := flashinfer_problem(device, dtype)):
        raise UserError(problem, where="engine_args.torch.operators", do="leave it out, or install the extra `cuda`")
    with doing("loading the target"):
        target = load_target(model.model, dtype=dtype, device=device, revision=model.revision)
        kind = target.embedding.dtype, target.device
        target.pack(compiled=compiled, operators=gpu_operators(target.config, *kind) if compiled else None)
    target.operators.flashinfer = flashinfer
    capacity = deployment.limits.max_model_len or target.config.max_position_embeddings
    speculator: Speculator | None = None
    policy: WidthPolicy = FixedWidth(1)
    if uses_drafter(deployment):
        drafter = load_fused(deployment, target, opened)
        block_size = deployment.speculation.block_size or drafter.config.block_size
        speculator = Speculator(drafter, target, block_size=block_size, max_batch_size=entries, capacity=capacity)
        policy = _policy(deployment, speculator, entries)
    scheduler = Scheduler(target, speculator, policy, max_batch_size=entries, capacity=capacity)
    with doing("preparing its steps"):
        scheduler.prepare()
        engine = EmbeddedEngine(scheduler, load_tokenizer(model.model, model.revision))
    engine.deployment = deployment
    return engine


def _operators(deployment: Deployment) -> tuple[bool, bool]:  # compiled, and FlashInfer's
    operators = deployment.engine_args.get("torch", {}).get("operators", "auto")
    return operators != "plain", operators == "flashinfer"


def load_fused(deployment: Deployment, target: TargetModel, opened: Checkpoint | None = None) -> FusedDrafter:
    """The deployment's drafter, laid out for decoding, beside a target that is loaded.

    Args:
        opened: its files, where they are read already.
    """
    assert deployment.drafter is not None
    kind, (compiled, flashinfer) = (target.embedding.dtype, target.device), _operators(deployment)
    name, revision = opened or deployment.drafter.model, deployment.drafter.revision
    with doing("loading the drafter"):
        loaded = load_drafter(name, revision=revision, dtype=kind[0], device=kind[1], dequantise=True)
        made = gpu_operators(loaded.config, *kind) if compiled else None
        drafter = FusedDrafter(loaded, compiled=compiled, operators=made)
    drafter.operators.flashinfer = flashinfer
    return drafter


def gpu_operators(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> PlainOperators | None:
    """Triton's operators for a model on a GPU; None elsewhere, and, with a warning, where they fail or differ."""
    if device.type != "cuda":
        return None
    try:
        from dflash_serve.models import triton_kernels  # imported here: a CPU has no use for Triton

        problem = triton_kernels.difference(config, dtype, device)
    except Exception as error:  # Triton is missing, its compiler or a driver fails: PyTorch's operators always run
        problem = first_line(error)
    if problem is None:
        return triton_kernels.TritonOperators()
    _say(problem)
    return None


@cache
def _say(problem: str) -> None:  # once for a target and its drafter
    log.warning("no Triton kernels: PyTorch's own operators are used, which are slower (%s)", problem)


def _policy(deployment: Deployment, speculator: Speculator, entries: int) -> WidthPolicy:
    width = deployment.speculation.width
    if isinstance(width, int):
        return FixedWidth(width)
    cost = given_cost() or cost_of(speculator.target, speculator.drafter, speculator.block_size, entries)
    return chosen_width(deployment, cost, speculator.block_size, static=speculator.drafter_runner.static)


def chosen_width(deployment: Deployment, cost: CostModel, block_size: int, *, static: bool) -> KeptWidth:
    """The policy of `width: auto`, which begins with the last run of this drafter.

    Args:
        static: steps are padded passes, which take as long for every request as their widest block does.
    """
    assert deployment.drafter is not None
    folder = drafter_folder(deployment.drafter.model, deployment.drafter.revision)
    shared = sizes(1, block_size) if static else None
    return KeptWidth(cost, block_size, LastRun(folder, deployment.target), shared)

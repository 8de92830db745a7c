"""The embedded engine: prompts in, streamed text out, on this process's own device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_serve.backend import Prompt
from dflash_serve.errors import UserError
from dflash_serve.outputs import Chunk, RequestOutput
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.width import FixedWidth

from .answer import Answer
from .scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EmbeddedEngine:
    """Runs prompts through a Scheduler, as many at once as its K/V cache has entries; the rest wait in order."""

    def __init__(self, scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase) -> None:
        self.scheduler, self.tokenizer = scheduler, tokenizer
        self.outputs_by_index: dict[int, RequestOutput] = {}
        """Finished requests of the running or last `stream`, by the index of their prompt."""

    def stream(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Chunk]:
        """News of all prompts as steps end; each ends with a chunk that has a finish_reason.

        Raises:
            UserError: a prompt that does not fit; nothing has run then.
        """
        waiting = deque((n, self.tokenise(p), par) for n, (p, par) in enumerate(zip(prompts, params, strict=True)))
        for _, token_ids, param in waiting:
            self.scheduler.check(token_ids, param)
        self.outputs_by_index.clear()
        answers: dict[int, Answer] = {}
        try:
            while waiting or self.scheduler.running:
                while waiting and self.scheduler.free_entries:
                    index, token_ids, param = waiting.popleft()
                    sequence = self.scheduler.join(token_ids, param)
                    answers[sequence.id] = Answer(index, sequence, self.tokenizer.backend_tokenizer)
                yield from self._step(answers)
        finally:  # a caller that stops listening frees its entries
            for sequence in list(self.scheduler.running):
                self.scheduler.leave(sequence)

    def _step(self, answers: dict[int, Answer]) -> Iterator[Chunk]:
        for result in self.scheduler.step():
            answer = answers[result.request.id]
            chunk = answer.advance(result)
            if answer.stream.stopped and result.request in self.scheduler.running:
                self.scheduler.leave(result.request)
            if chunk.finish_reason is not None:
                self.outputs_by_index[answer.index] = answer.output()
            if chunk.token_ids or chunk.finish_reason:
                yield chunk

    def outputs(self) -> list[RequestOutput]:
        """The finished requests of the last `stream`, in the order of its prompts."""
        return [self.outputs_by_index[index] for index in sorted(self.outputs_by_index)]

    def plain(self) -> EmbeddedEngine:
        """The same target without speculation, to compare with: no drafter, no features taken."""
        full = self.scheduler
        scheduler = Scheduler(
            full.target, None, FixedWidth(1), max_batch_size=full.cache.entries, capacity=full.capacity
        )
        return EmbeddedEngine(scheduler, self.tokenizer)

    def tokenise(self, prompt: Prompt) -> list[int]:
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

"""The embedded engine: prompts in, streamed text out, on this process's own device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from dflash_serve.backend import Prompt
from dflash_serve.errors import UserError
from dflash_serve.outputs import Chunk, RequestOutput
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.width import FixedWidth

from .answer import Answer
from .decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EmbeddedEngine:
    """Runs prompts through a Decoder, as many at once as it has slots; the rest wait in order."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer
        self.outputs_by_index: dict[int, RequestOutput] = {}
        """Finished requests of the running or last `stream`, by the index of their prompt."""

    def stream(self, prompts: Many[Prompt], params: Many[SamplingParams]) -> Iterator[Chunk]:
        """News of all prompts as steps end; each ends with a chunk that has a finish_reason.

        Raises:
            UserError: a prompt that does not fit; nothing has run then.
        """
        waiting = deque((n, self.tokenise(p), par) for n, (p, par) in enumerate(zip(prompts, params, strict=True)))
        for _, token_ids, param in waiting:
            self.decoder.check(token_ids, param)
        self.outputs_by_index.clear()
        answers: dict[int, Answer] = {}
        try:
            while waiting or self.decoder.running:
                while waiting and self.decoder.free_slots:
                    index, token_ids, param = waiting.popleft()
                    sequence = self.decoder.join(token_ids, param)
                    answers[sequence.id] = Answer(index, sequence, self.tokenizer.backend_tokenizer)
                yield from self._step(answers)
        finally:  # a caller that stops listening frees its slots
            for sequence in list(self.decoder.running):
                self.decoder.leave(sequence)

    def _step(self, answers: dict[int, Answer]) -> Iterator[Chunk]:
        for gain in self.decoder.step():
            answer = answers[gain.sequence.id]
            chunk = answer.advance(gain)
            if answer.stream.stopped and gain.sequence in self.decoder.running:
                self.decoder.leave(gain.sequence)
            if chunk.finish_reason is not None:
                self.outputs_by_index[answer.index] = answer.output()
            if chunk.token_ids or chunk.finish_reason:
                yield chunk

    def outputs(self) -> list[RequestOutput]:
        """The finished requests of the last `stream`, in the order of its prompts."""
        return [self.outputs_by_index[index] for index in sorted(self.outputs_by_index)]

    def plain(self) -> EmbeddedEngine:
        """The same target without speculation, to compare with: no drafter, no features taken."""
        full = self.decoder
        decoder = Decoder(full.target, None, FixedWidth(1), slots=full.store.slots, capacity=full.capacity)
        return EmbeddedEngine(decoder, self.tokenizer)

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

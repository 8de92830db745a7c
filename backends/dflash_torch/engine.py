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

from .decoder import Decoder
from .sequence import Sequence
from .text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Request:
    """A sequence on its way, and the text it has given."""

    def __init__(self, index: int, sequence: Sequence, stream: TextStream) -> None:
        self.index, self.sequence, self.stream = index, sequence, stream
        self.text = ""

    def advance(self, token_ids: list[int]) -> Chunk:
        """The chunk of one step; a completed stop string finishes the request."""
        ended = self.sequence.finish_reason is not None
        special = {token_ids[-1]} if ended and self.sequence.finish_reason == "stop" and token_ids else set()
        text = self.stream.feed([token for token in token_ids if token not in special])
        if self.stream.stopped:
            self.sequence.finish_reason = "stop"
        elif ended:
            text += self.stream.flush()
        self.text += text
        return Chunk(self.index, text, token_ids, self.sequence.finish_reason)

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
        )


class EmbeddedEngine:
    """Runs prompts through a Decoder, as many at once as it has slots; the rest wait in order."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer
        self._outputs: dict[int, RequestOutput] = {}

    def stream(self, prompts: Many[Prompt], params: Many[SamplingParams]) -> Iterator[Chunk]:
        """News of all prompts as steps end; each ends with a chunk that has a finish_reason.

        Raises:
            UserError: a prompt that does not fit; nothing has run then.
        """
        waiting = deque((n, self.tokenise(p), par) for n, (p, par) in enumerate(zip(prompts, params, strict=True)))
        for _, token_ids, _ in waiting:
            self.decoder.check_prompt(token_ids)
        self._outputs.clear()
        requests: dict[int, _Request] = {}
        try:
            while waiting or self.decoder.running:
                while waiting and self.decoder.free_slots:
                    index, token_ids, param = waiting.popleft()
                    sequence = self.decoder.join(token_ids, param)
                    stream = TextStream(self.tokenizer.backend_tokenizer, param.stop)
                    requests[sequence.id] = _Request(index, sequence, stream)
                yield from self._step(requests)
        finally:  # a caller that stops listening frees its slots
            for sequence in list(self.decoder.running):
                self.decoder.leave(sequence)

    def _step(self, requests: dict[int, _Request]) -> Iterator[Chunk]:
        for gain in self.decoder.step():
            request = requests[gain.sequence.id]
            chunk = request.advance(gain.token_ids)
            if request.stream.stopped and gain.sequence in self.decoder.running:
                self.decoder.leave(gain.sequence)
            if chunk.finish_reason is not None:
                self._outputs[request.index] = request.output()
            if chunk.token_ids or chunk.finish_reason:
                yield chunk

    def outputs(self) -> list[RequestOutput]:
        """The finished requests of the last `stream`, in the order of its prompts."""
        return [self._outputs[index] for index in sorted(self._outputs)]

    def plain(self) -> EmbeddedEngine:
        """The same target without speculation, to compare with: no drafter, no features taken."""
        full = self.decoder
        slots = len(full.free_slots) + len(full.running)
        return EmbeddedEngine(
            Decoder(full.target, None, FixedWidth(1), slots=slots, capacity=full.capacity), self.tokenizer
        )

    def tokenise(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the target's own template.

        Raises:
            UserError: messages for a target without a template, or ones that it refuses.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not prompt or not isinstance(prompt[0], Mapping):
            return [int(token) for token in prompt]  # type: ignore[arg-type, call-overload]
        try:
            encoded = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise what they like
            raise UserError(f"the target's chat template refuses them ({error})", where="messages") from None
        return list(encoded["input_ids"])

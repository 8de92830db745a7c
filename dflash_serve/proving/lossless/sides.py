"""Where answers come from: an engine in this process, or a server. A Pair is the two that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from dflash_serve.backend import Engine
from dflash_serve.client.answer import Answer, Choice
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import read_acceptance
from dflash_serve.errors import UserError
from dflash_serve.outputs import TokenLogprob
from dflash_serve.proving.lossless.plan import Question
from dflash_serve.speculation.statistics import AcceptanceStatistics

Facts = Mapping[str, str | None]
"""What a report says of a side: no secrets."""


class Side(Protocol):
    """Something that answers."""

    def answers(
        self, questions: Sequence[Question], *, top_logprobs: int | None = None
    ) -> Iterator[tuple[int, Answer]]:
        """Index and answer of every question, as they are finished."""
        ...

    def acceptance(self) -> AcceptanceStatistics:
        """What the drafter was worth until now; unknown where nobody counts."""
        ...


@dataclass(frozen=True)
class Pair:
    """The same engine with and without speculation. Either side may be opened several times, one at a time."""

    speculating: Callable[[], AbstractContextManager[Side]]
    plain: Callable[[], AbstractContextManager[Side]]
    facts: Mapping[str, Facts] = field(default_factory=dict)
    """`with` and `without`."""


class EngineSide:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.statistics = AcceptanceStatistics()

    def answers(
        self, questions: Sequence[Question], *, top_logprobs: int | None = None
    ) -> Iterator[tuple[int, Answer]]:
        """As they are finished, as many at once as the engine has slots."""
        params = [question.params.model_copy(update={"logprobs": top_logprobs}) for question in questions]
        token_ids: dict[int, list[int]] = {index: [] for index in range(len(questions))}
        logprobs: dict[int, list[TokenLogprob]] = {index: [] for index in range(len(questions))}
        stream = self.engine.stream([question.prompt for question in questions], params)
        for chunk in stream:
            token_ids[chunk.index] += chunk.token_ids
            logprobs[chunk.index] += chunk.logprobs or []
            if chunk.finish_reason is not None:
                yield chunk.index, self._answer(token_ids[chunk.index], logprobs[chunk.index], chunk.finish_reason)
        self.statistics += sum((output.statistics for output in stream.outputs()), start=AcceptanceStatistics())

    def acceptance(self) -> AcceptanceStatistics:
        """Of all that was asked here."""
        return self.statistics

    def _answer(self, token_ids: list[int], logprobs: list[TokenLogprob], finish_reason: str) -> Answer:
        choices = tuple(
            Choice(self._name(one.token_id), one.logprob, tuple((self._name(t), value) for t, value in one.top))
            for one in logprobs
        )
        return Answer(
            text=str(self.engine.tokenizer.decode(token_ids)),
            token_ids=tuple(token_ids),
            logprobs=choices or None,
            tokens=tuple(choice.token for choice in choices) or None,
            finish_reason=finish_reason,
        )

    def _name(self, token_id: int) -> str:
        """As the vocabulary spells it: no two tokens look alike."""
        return str(self.engine.tokenizer.convert_ids_to_tokens(token_id))


class EndpointSide:
    """A server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.before = self._reading()

    def answers(
        self, questions: Sequence[Question], *, top_logprobs: int | None = None
    ) -> Iterator[tuple[int, Answer]]:
        """In order, several requests at a time."""
        asked = [(question.prompt, question.params) for question in questions]
        yield from enumerate(self.endpoint.complete_all(asked, top_logprobs=top_logprobs))

    def acceptance(self) -> AcceptanceStatistics:
        """By the server's own metrics, since this side was opened."""
        return self._reading().since(self.before)

    def _reading(self) -> AcceptanceStatistics:
        try:
            return read_acceptance(self.endpoint.base, api_key=self.endpoint.api_key)
        except UserError:  # metrics are a courtesy: no losslessness hangs on them
            return AcceptanceStatistics.unknown()

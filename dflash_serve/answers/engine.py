"""Engines of this process, and what they answer: prompts, chunks, outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or chat messages for the target's own template."""


class Conversation(list[Mapping[str, str]]):
    """Chat messages, with variables for the target's chat template, such as `enable_thinking`."""

    def __init__(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> None:
        super().__init__(messages)
        self.variables = dict(variables)


def template_variables(prompt: Prompt) -> dict[str, Any]:
    """Variables that a prompt gives its target's chat template."""
    return prompt.variables if isinstance(prompt, Conversation) else {}


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log probabilities of a token from the target's raw logits, before bias, penalties, temperature and grammar."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens at its position with their log probabilities, as many as the request wants."""


@dataclass
class Chunk:
    """Text and tokens that one step brought one request."""

    index: int  # Number of its prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None before the last chunk
    logprobs: list[TokenLogprob] | None = None  # One for each of `token_ids`; None unless requested


@dataclass
class RequestOutput:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    statistics: AcceptanceStatistics = field(repr=False)  # Acceptance in its decoding steps
    logprobs: list[TokenLogprob] | None = None  # One for each of `token_ids`; None unless requested
    steps: Sequence[tuple[int, int]] = field(default=(), repr=False)
    """(width, accepted) of each decoding step, in order; the prompt's own pass gave the first token."""


class Stream(Protocol):
    """The chunks of a few prompts as steps end, and their outputs. Closing it ends its requests, no others."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def __next__(self) -> Chunk: ...

    def outputs(self) -> list[RequestOutput]:
        """The requests that have finished so far, in the order of the prompts."""
        ...

    def close(self) -> None:
        """Ends what still runs of it."""
        ...


class Engine(Protocol):
    """A running engine in this process. Any number of streams may be open side by side."""

    tokenizer: Any  # The target's tokenizer (transformers)

    @property
    def dtype(self) -> str:
        """Arithmetic: `float32` or `bfloat16`."""
        ...

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        ...

    @property
    def block_size(self) -> int | None:
        """B, the anchor counted; None = no speculation."""
        ...

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the target's own template.

        Raises:
            UserError: messages for a target without a template, or ones that it refuses.
        """
        ...

    def stream(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Stream:
        """Starts the prompts; each ends with a chunk that has a finish_reason.

        Raises:
            UserError: a prompt that does not fit; nothing has run then.
        """
        ...

    def plain(self) -> Engine:
        """An engine with this target and without speculation, to compare with.

        It shares memory with this one: one of them answers at a time, until its streams are read or closed.
        """
        ...

    def fixed(self, width: int, fault: str | None = None) -> Engine:
        """An engine with this target and drafter that verifies `width` slots in every step; no prefix is reused.

        It shares memory with this one, as `plain`.

        Args:
            fault: a name from `controls`: the drafter is fed wrongly on purpose. Answers stay the same, drafts do not.
        """
        ...

    @property
    def controls(self) -> Sequence[str]:
        """Faults that every acceptance figure is to be held against: one that survives them is no proof."""
        ...

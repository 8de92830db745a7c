"""A step of some requests, from its launch to the tokens that it brings. The scheduler hands it on as a value."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from dflash_serve.answers.engine import TokenLogprob
from dflash_serve.models.kv_cache import to_device

from .model_runner import Fetched, Shape
from .request import Request

log = logging.getLogger(__name__)
# Marks a slot where the target's logits are NaN or infinite.
BROKEN = -2
NOT_FINITE = "the target's logits are NaN or infinite"


@dataclass(frozen=True)
class Part:
    """One request's part of a step."""

    request: Request
    width: int  # the most tokens that it may gain; 0 = the pass ends inside its prompt, and no token is chosen
    pending: int = 1  # tokens that the target sees for the first time, without the drafts
    features: Tensor | None = None  # [rows, F*H] of these and of the drafts, for the next draft
    logits: Tensor | None = None  # [W, V], for logprobs
    injects: bool = False  # the pass itself writes the features of what it verifies to the drafter's context


class Passed(NamedTuple):
    """Outputs of a block step's pass, from which its tokens are chosen (`block_step`)."""

    shape: Shape
    known: Tensor
    hidden: Tensor


@dataclass
class LaunchedStep:
    """A step whose passes are launched, and whose tokens the host has not read."""

    parts: list[Part]
    tokens: Fetched | None = None  # see `gained`; None = nothing is chosen, or not yet
    passed: Passed | None = None  # of a block step whose tokens are not chosen yet
    launched: float = field(default_factory=perf_counter)
    context_tokens: int = field(init=False)  # of the requests that decode, at the launch

    def __post_init__(self) -> None:
        decoding = [part.request for part in self.parts if part.request.is_decoding]
        self.context_tokens = sum(request.verified for request in decoding)

    def gained(self) -> list[list[int]]:
        """Waits for the tokens that each request gains: its accepted drafted tokens and the bonus token.

        `tokens` is [N, W + 1] for the N parts of which tokens are chosen: the target's own token in every row, then the
        number of accepted drafted tokens.
        """
        rows = iter(self.tokens.tolist() if self.tokens else ())
        found = list[list[int]]()
        for part in self.parts:
            *tokens, accepted = next(rows) if part.width else (0,)
            found.append(tokens[: min(accepted + 1, part.width, part.request.remaining)])
        return found


def in_flight(steps: Sequence[LaunchedStep]) -> dict[int, int]:
    """The requests of these steps, by id, and the most tokens that each gains by them."""
    return {part.request.id: part.width for step in steps for part in step.parts}


@dataclass(frozen=True)
class StepResult:
    """Tokens that one step brought one request, and a logprob for each if requested."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None

    @classmethod
    def of(cls, part: Part, tokens: list[int]) -> StepResult:
        """The result of one request, which fails if a token could not be chosen."""
        request = part.request
        if BROKEN in tokens:
            request.failure, tokens = NOT_FINITE, []
            log.error("%s: a request ends with an error", NOT_FINITE)
        return cls(request, tokens, _logprobs(part.logits, tokens, request.params.logprobs))

    def first(self, count: int) -> StepResult:
        """The first `count` tokens of the result."""
        return StepResult(self.request, self.token_ids[:count], self.logprobs and self.logprobs[:count])


def _logprobs(rows: Tensor | None, tokens: list[int], top: int | None) -> list[TokenLogprob] | None:
    if top is None or rows is None:
        return None
    # rows [W, V]; exact under speculation, since row j decided token j
    logprobs = rows[: len(tokens)].float().log_softmax(-1)
    chosen = logprobs.gather(-1, to_device(tokens, rows.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(top, dim=-1)
    tops = [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens, chosen, map(tuple, tops), strict=True)]

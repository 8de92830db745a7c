"""The engine's running requests, seen from the server: parts of tickets in, their news out. No threads here."""

from __future__ import annotations

import logging
from time import monotonic

from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from ..detokenizer import Answer
from ..engine import EmbeddedEngine
from ..request import Request
from ..sampler import StepResult
from .metrics import Metrics
from .ticket import Failure, News, Part, Ticket

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""So many failed steps without a good one between them: the engine is broken, and only a new process helps."""

Entry = tuple[Ticket, News | Failure | None]
"""What happened to a part of a ticket; None = it was cancelled and is gone."""


class Seat:
    """A part that is running, and when it last had news."""

    def __init__(self, ticket: Ticket, answer: Answer) -> None:
        self.ticket, self.answer, self.last = ticket, answer, 0.0


class Batch:
    """What runs on one engine. A failure stays with the requests it belongs to."""

    def __init__(self, engine: EmbeddedEngine, metrics: Metrics) -> None:
        self.engine, self.scheduler, self.metrics = engine, engine.scheduler, metrics
        self.seats: dict[int, Seat] = {}
        self._failed_steps = 0

    @property
    def broken(self) -> bool:
        """Step after step has failed."""
        return self._failed_steps >= MAX_FAILED_STEPS

    def warm_up(self) -> None:
        """One short answer before the server says it is ready: what is slow or broken shows now."""
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        list(self.engine.stream([[0, 1]], [params]))
        self.scheduler.statistics = AcceptanceStatistics()
        self.scheduler.cache_manager.holds.clear()

    def join(self, ticket: Ticket, part: Part) -> list[Entry]:
        """Seats a part; there must be a free slot."""
        try:
            request = self.scheduler.join(part.token_ids, part.params, grammar=part.grammar, salt=ticket.salt)
        except Exception as error:
            log.exception("a request could not join")
            return [(ticket, Failure(str(error), 400 if isinstance(error, UserError) else 500))]
        answer = Answer(part.index, request, self.engine.tokenizer.backend_tokenizer)
        self.seats[request.id] = Seat(ticket, answer)
        self.metrics.joined(request, monotonic() - ticket.arrived)
        return []

    def soon_reusable(self, ticket: Ticket, part: Part) -> bool:
        """Another answer to the same prompt is still computing what this part could copy once it is through."""
        siblings = [seat.answer.request for seat in self.seats.values() if seat.ticket is ticket]
        same = [s for s in siblings if s.token_ids[: s.prompt_length] == part.token_ids]
        return bool(same) and not any(s.is_decoding for s in same)

    def drop_cancelled(self) -> list[Entry]:
        """Frees the slots of those nobody waits for."""
        gone = [request for request in self.scheduler.running if self.seats[request.id].ticket.cancelled]
        for request in gone:
            self.scheduler.leave(request)
            self.metrics.ended("abort")
        return [(self.seats.pop(request.id).ticket, None) for request in gone]

    def step(self) -> list[Entry]:
        """One step of all of them."""
        try:
            results = self.scheduler.step()
        except Exception:
            log.exception("a step failed: its %d requests fail with it, the server goes on", len(self.seats))
            self._failed_steps += 1
            return self.fail("the step that held this request failed; the server goes on, send it again")
        self._failed_steps = 0
        return [entry for result in results if (entry := self._news(result)) is not None]

    def fail(self, message: str, status: int = 500) -> list[Entry]:
        """Ends all of them; what their slots hold is not trusted any more."""
        for request in list(self.scheduler.running):
            self.scheduler.leave(request, sound=False)
        failed, self.seats = list(self.seats.values()), {}
        for _ in failed:
            self.metrics.ended("error")
        return [(seat.ticket, Failure(message, status)) for seat in failed]

    def _news(self, result: StepResult) -> Entry | None:
        """What a step brought one part, and its end where it has one; None while it is in its prompt."""
        request = result.request
        seat = self.seats[request.id]
        try:
            chunk = seat.answer.advance(result)
        except Exception:
            log.exception("an answer could not be turned into text")
            request.failure = "the answer could not be turned into text"
        if request.failure is None and chunk.finish_reason is None and not chunk.token_ids:
            return None
        if request.failure is not None or chunk.finish_reason is not None:
            del self.seats[request.id]
            if request in self.scheduler.running:  # a stop string, which the scheduler does not know of
                self.scheduler.leave(request)
        self._observe(seat, request, len(result.token_ids))
        if request.failure is not None:
            return seat.ticket, Failure(request.failure)
        return seat.ticket, News(chunk, request if chunk.finish_reason else None)

    def _observe(self, seat: Seat, request: Request, tokens: int) -> None:
        now = monotonic()
        if seat.last:
            self.metrics.tokens(tokens, now - seat.last)
        else:
            self.metrics.first_token(tokens, now - seat.ticket.arrived)
        seat.last = now
        if request.finish_reason or request.failure:
            self.metrics.ended(request.finish_reason or "error", now - seat.ticket.arrived)

"""Systems under test: an engine in this process, or a server. A SubjectPair is the two that are compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import sleep
from typing import Protocol

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.own_width import FIELD, OFF, WAYS
from dflash_serve.adapter.protocol import ServerBackend
from dflash_serve.adapter.registry import EMBEDDED, embedded_backend
from dflash_serve.answers.engine import Chunk, Engine, Prompt, Stream
from dflash_serve.client.endpoint import TOKEN_IDS, UNITS, Endpoint, Reply, ScoredToken
from dflash_serve.client.metrics import ServerReading
from dflash_serve.common.http import RefusedError
from dflash_serve.common.processes import PATIENCE_SECONDS
from dflash_serve.deployment.description import Deployment, Speculation
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from dflash_serve.verify.questions import WITH, WITHOUT, Precision, Question

LATE = (
    "with overlapped scheduling SGLang penalises a token by those before the last one only; start the plain server "
    "with --disable-overlap-schedule to test them"
)
DRAFTS = "it drafts all the same"
SHARED = f"{DRAFTS}, or others use it meanwhile"
UNTOLD_DRAFTS = "neither its answers nor its metrics tell how many tokens were drafted"
READINGS, BETWEEN_READINGS = 20, 0.05  # most readings until metrics stay as they are, and seconds from one to the next
ONE_SERVER = "faults that requests without speculation share (one server was asked both ways)"
UNTOLD = "SGLang may penalise a token by those before the last one only: its /server_info, which tells, is not found"
Description = Mapping[str, str | None]  # A report's description of a subject; it holds no secrets


class Subject(Protocol):
    """A system under test."""

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        """Index and answer of every question, as they are finished.

        Raises:
            RefusedError: it does not take such requests.
        """
        ...

    def acceptance(self) -> AcceptanceStatistics:
        """Acceptance of drafted tokens until now; unknown if the system does not count it."""
        ...

    def speculates(self, probe: Question | None = None) -> bool | None:
        """True if it drafts or ever has; None = unknown.

        Args:
            probe: a question to a server that comes first, so that its counters move.
        """
        ...

    def wrong_penalties(self) -> str | None:
        """The reason why its own answers with penalties are not right without speculation; None: they are."""
        ...


@dataclass(frozen=True)
class SubjectPair:
    """One engine with and without speculation. Each may be opened several times, one at a time."""

    speculating: Callable[[], AbstractContextManager[Subject]]
    plain: Callable[[], AbstractContextManager[Subject]]
    descriptions: Mapping[str, Description] = field(default_factory=dict)  # By side, `with` and `without`
    dtype: Precision | None = None  # None = unknown
    context: Callable[[], int | None] = lambda: None  # Most tokens of a prompt and its answer; None = unknown
    embedded: bool = False  # True if it runs in this process
    plain_is_ours: bool = True
    """True if we started the plain side without a drafter; otherwise its metrics must show that it has none."""
    agree: Callable[[Sequence[Prompt]], tuple[str, ...]] = lambda prompts: ()
    """Has both sides answer such prompts in the finest unit that both have; tells what is not tested for that."""


class EngineSubject:
    """An engine in this process, which batches the questions and counts acceptance itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.statistics = AcceptanceStatistics()

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        if any(question.more for question in questions):
            raise RefusedError("only a server takes it", where=EMBEDDED, status=400)
        again = {} if top_logprobs is None else {"logprobs": top_logprobs}
        params = [question.params.model_copy(update=again) for question in questions]
        answered: list[list[Chunk]] = [[] for _ in questions]
        prompts, opened = self._stream(questions, params)
        with closing(opened) as stream:
            for chunk in stream:
                answered[chunk.index].append(chunk)
                if chunk.finish_reason is not None:
                    yield chunk.index, self._reply(prompts[chunk.index], answered[chunk.index])
            self.statistics += total(output.statistics for output in stream.outputs())

    def acceptance(self) -> AcceptanceStatistics:
        return self.statistics

    def speculates(self, probe: Question | None = None) -> bool | None:
        return self.engine.block_size is not None

    def wrong_penalties(self) -> str | None:
        return None

    def _stream(
        self, questions: Sequence[Question], params: Sequence[SamplingParams]
    ) -> tuple[list[list[int]], Stream]:
        """The prompts' token ids, and the answers to them."""
        try:
            prompts = [self.engine.tokenize(question.prompt) for question in questions]
            return prompts, self.engine.stream(prompts, params)
        except UserError as error:
            raise RefusedError(error.what, where=error.where, do=error.do, status=400) from None

    def _reply(self, prompt: Sequence[int], chunks: Sequence[Chunk]) -> Reply:
        scored = tuple(
            ScoredToken(self._name(one.token_id), one.logprob, tuple((self._name(t), value) for t, value in one.top))
            for chunk in chunks
            for one in chunk.logprobs or ()
        )
        text, token_ids = "".join(chunk.text for chunk in chunks), (t for chunk in chunks for t in chunk.token_ids)
        ended = chunks[-1].finish_reason
        return Reply(text, tuple(token_ids), scored or None, finish_reason=ended, prompt_ids=tuple(prompt))

    def _name(self, token_id: int) -> str:
        # as the vocabulary spells it: no two tokens look alike
        return str(self.engine.tokenizer.convert_ids_to_tokens(token_id))


class ServerSubject:
    """A server, asked several questions at a time; acceptance by its metrics since this subject was opened."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.before = self._reading()

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        yield from enumerate(self.endpoint.complete_all(questions, top_logprobs=top_logprobs))

    def acceptance(self) -> AcceptanceStatistics:
        return self._reading().since(self.before)

    def speculates(self, probe: Question | None = None) -> bool | None:
        if probe is not None:
            list(self.answers([probe]))
        return self._reading().acceptance.speculates

    def wrong_penalties(self) -> str | None:
        serial = self.endpoint.sglang_settings().get("disable_overlap_schedule")
        if serial is None:  # an ingress may serve the paths of /v1 alone
            return UNTOLD if self.endpoint.is_sglang or "SGLang" in (self.before.engine or "") else None
        return None if serial else LATE

    def settled(self) -> ServerReading:
        """Its metrics when they move no more: some engines count a step after its answer has gone out."""
        last = self._reading()
        for _ in range(READINGS):
            sleep(BETWEEN_READINGS)
            last, before = self._reading(), last
            if last.acceptance == before.acceptance:
                break
        return last

    def _reading(self) -> ServerReading:
        try:
            return self.endpoint.metrics.read()
        except UserError:  # losslessness does not depend on metrics
            return ServerReading.unknown()


class SwitchedSubject(ServerSubject):
    """A server that is asked not to draft, in the first way that works.

    Each answer tells that nothing was drafted for it, where answers tell. Its metrics count no drafted token meanwhile,
    so it has no other clients.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._plainly, self._is_told = replace(endpoint, always=WAYS[0]), True
        self._found, self._late = self.before, 0  # its metrics after the way was found, and most steps counted later

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        before = None if self._is_told else self.settled()
        for index, reply in enumerate(self._plainly.complete_all(questions, top_logprobs=top_logprobs)):
            if reply.drafted:
                raise self._disobeyed(DRAFTS)
            yield index, reply
        if before is not None and self.settled().since(before).verifications != 0:
            raise self._disobeyed(SHARED)

    def speculates(self, probe: Question | None = None) -> bool | None:
        if probe is not None:
            self._find_way(probe)
            self._found, self._late = self.settled(), probe.params.max_tokens or 0
            return False
        later = self.settled().since(self._found).verifications
        if later is not None and later > self._late:
            raise self._disobeyed(SHARED)  # its answers tell another number than it drafted
        return False if later is not None or self._found.acceptance.verifications is None else None

    def wrong_penalties(self) -> str | None:
        return None  # our own steps count them, at width 1, too

    def _find_way(self, probe: Question) -> None:
        drafted, is_told = self._drafted_for(self.endpoint, probe)
        if not drafted:
            raise self._disobeyed(UNTOLD_DRAFTS if drafted is None else "it drafts for no request")
        refused = ""
        for way in WAYS:
            self._plainly, self._is_told = replace(self.endpoint, always=way), is_told
            try:
                if self._drafted_for(self._plainly, probe)[0] == 0:
                    return
            except RefusedError as error:  # other engines do not know the field, ours says why it cannot
                refused = error.what if FIELD in error.what else refused
        raise self._disobeyed(refused or DRAFTS)

    def _drafted_for(self, endpoint: Endpoint, probe: Question) -> tuple[float | None, bool]:
        """Drafted tokens, or steps with some, for a question, and True if the answer told; None = unknown."""
        before = self.settled()
        reply = next(endpoint.complete_all([probe]))
        if reply.drafted is not None:
            return reply.drafted, True
        return self.settled().since(before).verifications, False

    def _disobeyed(self, what: str) -> UserError:
        do = "start a second one without speculation, and give --without-url"
        return UserError(f"a request cannot switch speculation off: {what}", where=self.endpoint.base, do=do)


def one_server(endpoint: Endpoint) -> SubjectPair:
    """One server that runs already and lets requests switch speculation off; it is asked with speculation and without.

    Raises:
        UserError: it cannot be reached, or has no metrics, without which nothing can be shown.
    """
    endpoint.metrics.require("--metrics-url")
    described = {"url": endpoint.base, "model": endpoint.served_model}
    plain = SwitchedSubject(endpoint)
    return SubjectPair(
        lambda: nullcontext(ServerSubject(endpoint)),
        lambda: nullcontext(plain),
        {WITH: described, WITHOUT: {**described, **OFF}},
        context=lambda: endpoint.context,
        plain_is_ours=False,
        agree=lambda prompts: (ONE_SERVER,),
    )


def two_servers(speculating: Endpoint, plain: Endpoint) -> SubjectPair:
    """Two servers that run already.

    Raises:
        UserError: both are the same, or one cannot be reached or has no metrics, without which nothing can be shown.
    """
    if speculating.base == plain.base:
        raise UserError("both are the same server", where=plain.base, do="start a second one without speculation")
    sides = {WITH: speculating, WITHOUT: plain}
    for side, endpoint in sides.items():
        endpoint.metrics.require("--metrics-url" if side == WITH else "--without-metrics-url")

    def agree(prompts: Sequence[Prompt]) -> tuple[str, ...]:
        try:
            units = {side: endpoint.finest_unit(prompts) for side, endpoint in sides.items()}
        except RefusedError:  # the case that is refused will say so
            return ()
        common = max(units.values(), key=UNITS.index)
        sides.update({side: replace(endpoint, unit=common) for side, endpoint in sides.items()})
        poorest = " and ".join(side for side, unit in units.items() if unit == common)
        return () if common == TOKEN_IDS else (f"{TOKEN_IDS} ({poorest} speculation, answers have {common} alone)",)

    return SubjectPair(
        lambda: nullcontext(ServerSubject(sides[WITH])),
        lambda: nullcontext(ServerSubject(sides[WITHOUT])),
        {side: {"url": endpoint.base, "model": endpoint.served_model} for side, endpoint in sides.items()},
        context=lambda: min((one.context for one in sides.values() if one.context), default=None),
        plain_is_ours=False,
        agree=agree,
    )


def engine_in_process(deployment: Deployment) -> SubjectPair:
    """One engine in this process, with its drafter and without.

    Raises:
        UserError: the deployment has problems.
    """
    engine = embedded_backend().engine(deployment)
    speculating, plain = EngineSubject(engine), EngineSubject(engine.plain())
    return SubjectPair(
        lambda: nullcontext(speculating),
        lambda: nullcontext(plain),
        _descriptions(EMBEDDED, deployment, _without_drafter(deployment)),
        "float32" if engine.dtype == "float32" else "bfloat16",
        lambda: deployment.limits.max_model_len,
        embedded=True,
    )


def server_started_twice(
    backend: ServerBackend,
    deployment: Deployment,
    folder: Path | None = None,
    *,
    concurrency: int = 16,
    patience: float = PATIENCE_SECONDS,
) -> SubjectPair:
    """A deployment's server, started with the drafter and without, one at a time.

    Args:
        folder: holds a folder for the files and the log of each; None = a new temporary one, which is kept.
        concurrency: requests in flight.
        patience: seconds until it must be ready.

    Raises:
        UserError: the deployment has a problem, with or without its drafter.
    """
    plain = _without_drafter(deployment)
    for one in (deployment, plain):
        raise_problems(backend.launch(one).problems)
    logs = folder or Path(tempfile.mkdtemp(prefix="dflash-serve-verify-"))

    @contextmanager
    def started(one: Deployment, side: str) -> Iterator[Subject]:
        with running_server(backend, one, logs / side, patience=patience) as url:
            yield ServerSubject(Endpoint(url, concurrency=concurrency))

    return SubjectPair(
        lambda: started(deployment, WITH),
        lambda: started(plain, WITHOUT),
        _descriptions(backend.name, deployment, plain),
        "float32" if deployment.hardware.dtype == "float32" else "bfloat16",
        lambda: deployment.limits.max_model_len,
    )


def _without_drafter(deployment: Deployment) -> Deployment:
    return deployment.model_copy(update={"drafter": None, "speculation": Speculation()})


def _descriptions(backend: str, deployment: Deployment, plain: Deployment) -> dict[str, Description]:
    return {
        side: {
            "backend": backend,
            "target": one.target.model,
            "drafter": one.drafter.model if one.drafter else None,
            "width": str(one.speculation.width) if one.drafter else "off",
            "deployment": one.model_dump_json(exclude_defaults=True),
        }
        for side, one in ((WITH, deployment), (WITHOUT, plain))
    }

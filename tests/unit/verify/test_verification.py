"""Answers of a server whose rounding depends on the batch differ in near-ties, which the plain side can score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from dflash_serve.answers.engine import Prompt
from dflash_serve.client.endpoint import Reply, ScoredToken
from dflash_serve.common.http import RefusedError
from dflash_serve.common.store import Store
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify.questions import (
    CONTINUED,
    FEWEST,
    LOAD,
    LONG,
    PROMPTS,
    STREAMED,
    WITH,
    Known,
    PlainFacts,
    Question,
    VerifyPlan,
    questions,
)
from dflash_serve.verify.report import Findings
from dflash_serve.verify.subjects import SubjectPair
from dflash_serve.verify.verification import Verification

GAP = 0.375  # nats between the two best tokens of a near-tie: three steps of a bfloat16 logit of 16
TIED = (100, 101)


class RoundedServer:
    """Every seventh token is one of two, which rounding chooses: with speculation the second, unless it is scored.

    A plain answer that is asked for again from its prompt on has the other token, as another batch may round it.

    Args:
        streams: streamed chats have token ids. SGLang 0.5.23's have none. No stream and no completion tells the ids of
            its prompt.
    """

    def __init__(self, speculating: bool, streams: bool) -> None:
        self.speculating, self.streams = speculating, streams

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        if self.speculating and any(question.params.logit_bias for question in questions):  # as vLLM 0.32
            raise RefusedError("no logit_bias beside a drafter", where="logit_bias", status=400)
        for index, question in enumerate(questions):
            in_chat = isinstance(question.prompt[0], dict)
            streamed = question.more.get("stream", False)
            if in_chat and streamed and not self.streams:
                raise RefusedError("no token ids", where="stream", status=400)
            yield index, self._reply(question, in_chat, streamed, scored=top_logprobs is not None)

    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics(10, 70, 30) if self.speculating else AcceptanceStatistics()

    def speculates(self, probe: Question | None = None) -> bool:
        return self.speculating

    def wrong_penalties(self) -> str | None:
        return None

    def _reply(self, question: Question, in_chat: bool, streamed: bool, scored: bool) -> Reply:
        prompt = _ids(question.prompt)
        first = len(prompt)
        chosen = TIED[in_chat if scored else self.speculating]
        ids = [chosen if at % 7 == 0 else at for at in range(first, first + (question.params.max_tokens or 1))]
        ids = [next(iter(question.params.logit_bias or ()), token) for token in ids]
        scores = tuple(ScoredToken(f"<{token}>", 0.0, _top(at)) for at, token in enumerate(ids, first))
        text, told = " ".join(f"<{token}>" for token in ids), in_chat and not streamed
        return Reply(text, tuple(ids), scores, prompt_ids=tuple(prompt) if told else None)


def _ids(prompt: Prompt) -> list[int]:
    return [part if isinstance(part, int) else 1 for part in prompt]


def _top(at: int) -> tuple[tuple[str, float], ...]:
    tied = at % 7 == 0
    best = tuple((f"<{token}>", -GAP * n) for n, token in enumerate(TIED)) if tied else ((f"<{at}>", 0.0),)
    return (*best, ("<5>", -3.0 - tied))


def verified(plain: RoundedServer, speculating: RoundedServer, store: Store | None = None) -> Findings:
    pair = SubjectPair(lambda: nullcontext(speculating), lambda: nullcontext(plain), dtype="bfloat16")
    plan = VerifyPlan(prompts=6, prompts_sha256="", max_tokens=40, samples=FEWEST, dtype="bfloat16")
    messages = [[{"role": "user", "content": str(number)}] for number in range(6)]
    return Verification(plan, messages, pair, store or Store(None, {})).run()


@pytest.mark.parametrize("streams", [False, True])
def test_answers_are_scored_that_no_reply_tells_the_prompt_of(streams: bool) -> None:
    store = Store(None, {})
    found = verified(RoundedServer(False, streams), RoundedServer(True, streams), store)
    differences = {one.case: one.differences for one in found.exact}
    for case in (LOAD, STREAMED, LONG, CONTINUED[LONG.name]):
        assert differences[case.name]
        assert {(one.kind, one.gap) for one in differences[case.name]} == {("near-tie", GAP)}
    assert "with/greedy/0/again" in store, "refused are those with penalties alone, which need a logit_bias"


class FailingServer(RoundedServer):
    """A server that fails to answer a prompt of one token, after it answered the try."""

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        if len(questions) > 1 and any(len(question.prompt) == 2 for question in questions):
            raise RefusedError("HTTP 500: Internal Server Error", where="load", status=500)
        yield from super().answers(questions, top_logprobs=top_logprobs)


def test_a_case_that_fails_with_speculation_alone_is_a_reason_and_not_only_untested() -> None:
    found = verified(RoundedServer(False, True), FailingServer(True, True))
    assert f"{LOAD.name}: failed (with speculation, HTTP 500: Internal Server Error)" in found.reasons
    assert not any(LOAD.name in one for one in found.scope)


class TerseServer(RoundedServer):
    """A plain server that refuses log-probabilities of its own tokens as prompts."""

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        if any(question.params.logprobs for question in questions):
            raise RefusedError("logprobs: at most 1", where="logprobs", status=400)
        yield from super().answers(questions, top_logprobs=top_logprobs)


def test_a_server_that_refuses_to_continue_answers_gets_a_verdict_all_the_same() -> None:
    found = verified(TerseServer(False, True), RoundedServer(True, True))
    assert not {case.name for case in CONTINUED.values()} & {one.case for one in found.exact}


class OtherTemplate(RoundedServer):
    """A server whose chat template begins with another token."""

    def _reply(self, question: Question, in_chat: bool, streamed: bool, scored: bool) -> Reply:
        reply = super()._reply(question, in_chat, streamed, scored)
        return reply if reply.prompt_ids is None else replace(reply, prompt_ids=(2, *reply.prompt_ids))


def test_sides_with_different_chat_templates_are_told_and_no_fault() -> None:
    with pytest.raises(UserError, match="different tokens of the same prompt"):
        verified(RoundedServer(False, True), OtherTemplate(True, True))


class ThinkingServer(RoundedServer):
    """A server with a reasoning parser, whose chats are all reasoning."""

    def _reply(self, question: Question, in_chat: bool, streamed: bool, scored: bool) -> Reply:
        reply = super()._reply(question, in_chat, streamed, scored)
        return replace(reply, text="", reasoning=reply.text) if in_chat else reply


def test_reasoning_is_continued_and_stopped_as_other_answers_are() -> None:
    found = verified(ThinkingServer(False, True), ThinkingServer(True, True))
    assert next(one.prompts for one in found.exact if one.case == LONG.name) > 0
    assert "stop" in {one.rule for one in found.rules}


@pytest.mark.parametrize(("text", "tokens"), [("一二三四五六七八", 8), ("one two three four", 4)])
def test_long_prompts_of_unknown_tokens_fit_the_context_in_every_script(text: str, tokens: int) -> None:
    """A router drops token ids; answers then tell how many characters a token has."""
    size = len(text) // tokens
    known = [Known(text, [text[at : at + size] for at in range(0, size * tokens, size)])] * 2
    plan = VerifyPlan(prompts=2, prompts_sha256="", max_tokens=8, samples=0, dtype="float32")
    asked = questions(plan, [text, text], PROMPTS, WITH, PlainFacts(known, context=256))
    assert asked
    assert all(isinstance(one.prompt, str) and 64 < len(one.prompt) / size < 256 for one in asked[-1:])

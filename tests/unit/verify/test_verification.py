"""Answers of a server whose rounding depends on the batch differ in near-ties, which the plain side can score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from dflash_serve.backend import Prompt
from dflash_serve.client.endpoint import Reply, ScoredToken
from dflash_serve.common.http import RefusedError
from dflash_serve.common.store import Store
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify.questions import CONTINUED, LONG, STREAMED, Question, VerifyPlan
from dflash_serve.verify.subjects import SubjectPair
from dflash_serve.verify.verification import Verification

GAP = 0.375  # nats between the two best tokens of a near-tie: three steps of a bfloat16 logit of 16
TIED = (100, 101)


class RoundedServer:
    """Every seventh token is one of two, which rounding chooses: with speculation the second, unless it is scored.

    As SGLang 0.5.23 does it: streamed chats have no token ids, and completions do not tell the ids of their prompt.
    """

    def __init__(self, speculating: bool) -> None:
        self.speculating = speculating

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        for index, question in enumerate(questions):
            in_chat = isinstance(question.prompt[0], dict)
            if in_chat and question.more.get("stream"):
                raise RefusedError("no token ids", where="stream", status=400)
            yield index, self._reply(question, in_chat, scored=top_logprobs is not None)

    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics(10, 70, 30) if self.speculating else AcceptanceStatistics()

    def speculates(self, probe: Question | None = None) -> bool:
        return self.speculating

    def wrong_penalties(self) -> str | None:
        return None

    def _reply(self, question: Question, in_chat: bool, scored: bool) -> Reply:
        prompt = _ids(question.prompt)
        first = len(prompt)
        chosen = TIED[self.speculating and not scored]
        ids = [chosen if at % 7 == 0 else at for at in range(first, first + (question.params.max_tokens or 1))]
        ids = [next(iter(question.params.logit_bias or ()), token) for token in ids]
        scores = tuple(ScoredToken(f"<{token}>", 0.0, _top(at)) for at, token in enumerate(ids, first))
        return Reply(
            " ".join(f"<{token}>" for token in ids), tuple(ids), scores, prompt_ids=tuple(prompt) if in_chat else None
        )


def _ids(prompt: Prompt) -> list[int]:
    return [part if isinstance(part, int) else 1 for part in prompt]


def _top(at: int) -> tuple[tuple[str, float], ...]:
    tied = at % 7 == 0
    best = tuple((f"<{token}>", -GAP * n) for n, token in enumerate(TIED)) if tied else ((f"<{at}>", 0.0),)
    return (*best, ("<5>", -3.0 - tied))


def test_answers_are_scored_that_no_reply_tells_the_prompt_of() -> None:
    plain, speculating = RoundedServer(False), RoundedServer(True)
    pair = SubjectPair(lambda: nullcontext(speculating), lambda: nullcontext(plain), dtype="bfloat16")
    plan = VerifyPlan(prompts=6, prompts_sha256="", max_tokens=40, samples=0, dtype="bfloat16")
    messages = [[{"role": "user", "content": str(number)}] for number in range(6)]
    found = Verification(plan, messages, pair, Store(None, {})).run()
    differences = {one.case: one.differences for one in found.exact}
    for case in (STREAMED, LONG, CONTINUED[LONG.name]):
        assert differences[case.name]
        assert {(one.kind, one.gap) for one in differences[case.name]} == {("near-tie", GAP)}

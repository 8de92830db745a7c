"""Rules that an answer must keep by its own request, and facts that the same tokens must have on both sides.

A rule is certain: no correct server breaks it, so it has no false-alarm rate. A rule that the plain side breaks is no
rule of this engine, and is not tested.

| rule | an answer keeps it if |
|---|---|
| `max_tokens`, `min_tokens` | it has at most and at least so many tokens |
| `stop` | its text contains no stop string |
| `logit_bias` | it has no token but the ones with a bias of 100 |
| `n` | it has so many choices |
| `response_format` | its text is JSON of the schema |
| `usage` | the usage counts its tokens |
| `text` | the plain side gave the same text, finish reason and usage wherever it gave the same tokens |
| `seed` | the same request with the same seed gave the same answer; no fault where an engine does not promise it |
| `log-probabilities` | of each token agreed on, they are those of the plain side, except for rounding |
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

from dflash_serve.client.endpoint import Reply
from dflash_serve.common.settings import Frozen
from dflash_serve.verify.questions import SCHEMA, STOP, Case, Question
from dflash_serve.verify.tokens import Piece

SEED = "seed"
CHOICE = "\\0"  # Between the texts and the finish reasons of several choices
LOGPROBS_OFF = 0.05
"""Share of log-probabilities that may differ by more than rounding does. Those of another model nearly all differ."""


class RuleCheck(Frozen):
    """A rule, and the answers with speculation that it was applied to."""

    rule: str
    answers: int  # With speculation
    broken: int = 0  # Number of these that break it
    example: str | None = None  # The first of these: `stop strings, answer 3`
    honoured: bool = True  # False if the plain side breaks it, too


class Answer(NamedTuple):
    """An answer as it is kept."""

    pieces: list[Piece]
    text: str = ""
    usage: int | None = None  # Tokens by the server's own count
    finish_reason: str | None = None  # Those of several choices are joined as their texts are
    choices: int = 1
    logprobs: list[float] | None = None  # One for each piece, where the request asks for them
    prompt_ids: list[int] | None = None  # Token ids of the prompt, where the server tells them
    reasoning: str = ""  # Text before the answer's, where the server has a reasoning parser
    ranks: list[int] | None = None
    """For each piece, the number of reported best tokens that are more probable, where the request asks for them."""

    @classmethod
    def of(cls, reply: Reply) -> Answer:
        choices = reply.choices or (reply,)
        return cls(
            list(reply.pieces),
            CHOICE.join(choice.text for choice in choices),
            reply.completion_tokens,
            CHOICE.join(choice.finish_reason or "" for choice in choices) or None,
            len(choices),
            None if reply.logprobs is None else [one.logprob for one in reply.logprobs],
            None if reply.prompt_ids is None else list(reply.prompt_ids),
            CHOICE.join(choice.reasoning for choice in choices),
            _ranks(choices),
        )

    @property
    def drawn(self) -> list[Piece]:
        """The answer as a draw from a distribution; of several choices it also matters if they are alike."""
        each = len(self.pieces) // self.choices
        alike = all(self.pieces[n] == self.pieces[n % each] for n in range(len(self.pieces))) if each else True
        return [int(alike), *self.pieces] if self.choices > 1 else self.pieces


def _ranks(choices: Sequence[Reply]) -> list[int] | None:
    scored = [token for choice in choices for token in choice.logprobs or ()]
    return [sum(value > one.logprob for _, value in one.top) for one in scored] or None


class Asked(NamedTuple):
    """A question to both sides with its answers; a side's answer is None if it was not asked."""

    case: str
    number: int  # Of the question in its case, from 1 on
    question: Question
    same_prompt: bool  # True if all questions of the case have one prompt, so that their answers can be compared
    plain: Answer
    other: Answer


def check_rules(asked: Iterable[Asked], unit: str, noise: float) -> tuple[RuleCheck, ...]:
    """Every rule that an answer gave occasion for, in the order of their first occasion."""
    counts, broken, unkept = Counter[str](), Counter[str](), set[str]()
    examples = dict[str, str]()
    known = defaultdict[object, set[object]](set)
    asked = list(asked)
    for one in asked:
        known[_same(one, one.plain)].add(_facts(one.plain))
    for one in asked:
        unkept |= {rule for rule, keeps in kept(one.question, one.plain, unit) if not keeps}
        facts = known.get(_same(one, one.other), set())
        results = list(kept(one.question, one.other, unit))
        if facts and unit != "characters" and not one.question.params.stop:
            results.append(("text", _facts(one.other) in facts))
        elif one.question.params.stop and unit != "characters" and (keeps := _stopped_alike(one)) is not None:
            results.append(("text", keeps))
        for rule, keeps in results:
            counts[rule] += 1
            broken[rule] += not keeps
            if not keeps:
                examples.setdefault(rule, f"{one.case}, answer {one.number}")
    checks = [
        RuleCheck(
            rule=rule, answers=count, broken=broken[rule], example=examples.get(rule), honoured=rule not in unkept
        )
        for rule, count in counts.items()
    ]
    return (*checks, *_check_logprobs(asked, noise))


def kept(question: Question, answer: Answer, unit: str) -> Iterator[tuple[str, bool]]:
    """Every rule that the question sets, and True if the answer keeps it."""
    params, more, count = question.params, question.more, len(answer.pieces)
    choices = more.get("n", 1)
    if unit == "token ids":
        yield "max_tokens", count <= (params.max_tokens or count) * choices
        if params.min_tokens:
            yield "min_tokens", count >= params.min_tokens
        if params.logit_bias:
            yield "logit_bias", all(piece in params.logit_bias for piece in answer.pieces)
        if answer.usage is not None and not params.stop:  # engines count what follows the stop string in its block
            yield "usage", answer.usage == count
    if params.stop and not params.min_tokens:
        yield "stop", not any(stop in text for stop in params.stop for text in (answer.reasoning, answer.text))
    if choices > 1:
        yield "n", answer.choices == choices
    if "response_format" in more:
        reasons = (answer.finish_reason or "").split(CHOICE)
        each = zip_longest(answer.text.split(CHOICE), reasons, fillvalue="")
        yield "response_format", all(_is_of_schema(text, reason) for text, reason in each)


def comparable(case: Case, plain: Answer, other: Answer) -> tuple[list[Piece], list[Piece]]:
    """The pieces of both answers that must be equal.

    Engines differ in the tokens that they list about a stop string. All are compared that both sides list, and the end
    of the other side's, if it comes earlier than the plain side's and their texts differ.
    """
    if case is not STOP:
        return plain.pieces, other.pieces
    common = min(len(plain.pieces), len(other.pieces))
    early = len(other.pieces) < len(plain.pieces) and _text(plain) != _text(other)
    return plain.pieces[: common + early], other.pieces[:common]


def _stopped_alike(one: Asked) -> bool | None:
    # True if greedy answers end with the same text at their stop string; None: their tokens may part before it
    plain, other = one.plain, one.other
    common = min(len(plain.pieces), len(other.pieces))
    if not one.question.params.greedy or plain.pieces[:common] != other.pieces[:common]:
        return None
    if _text(plain) != _text(other):
        return None if len(other.pieces) < len(plain.pieces) else False
    # Some engines look at the length before they look for stop strings, and a block may bring both at once.
    full = one.question.params.max_tokens in (len(plain.pieces), len(other.pieces))
    return full or plain.finish_reason == other.finish_reason


def _text(answer: Answer) -> tuple[str, str]:
    return answer.reasoning, answer.text


def _is_of_schema(text: str, finish_reason: str) -> bool:
    # an answer that was cut off must begin as an object does
    if finish_reason == "length":
        return text.lstrip()[:1] in ("", "{")
    with suppress(ValueError):
        value: Any = json.loads(text)
        (name, allowed), *_ = SCHEMA["properties"].items()
        return isinstance(value, dict) and list(value) == [name] and value[name] in allowed["enum"]
    return False


def _same(one: Asked, answer: Answer) -> object:
    return one.case, -1 if one.same_prompt else one.number, tuple(answer.pieces)


def _facts(answer: Answer) -> object:
    return answer.text, answer.reasoning, answer.finish_reason, answer.usage


def _check_logprobs(asked: Sequence[Asked], noise: float) -> Iterator[RuleCheck]:
    total, off, example = 0, 0, None
    # Engines differ in whether temperature and filters are in what they report of sampled answers.
    wanted = [one for one in asked if one.question.params.logprobs is not None and one.question.params.greedy]
    for one in wanted:
        plain, other = one.plain, one.other
        values = plain.logprobs or (), other.logprobs or ()
        for mine, theirs, value, shown in zip_longest(plain.pieces, other.pieces, *values):
            if mine is None or mine != theirs or value is None:
                break
            total += 1
            if shown is None or not abs(value - shown) <= noise:
                off, example = off + 1, example or f"{one.case}, answer {one.number}"
    if wanted:
        yield RuleCheck(
            rule="log-probabilities",
            answers=total,
            broken=off if off > LOGPROBS_OFF * total else 0,
            example=example,
            honoured=total > 0,
        )

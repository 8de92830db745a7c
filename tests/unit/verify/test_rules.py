"""Facts beside the tokens: an answer without them is not taken for one that has them right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash_serve.client.endpoint import Reply, ScoredToken
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.questions import JSON, LOGPROBS, STOP, Question
from dflash_serve.verify.rules import Answer, Asked, RuleCheck, check_rules, comparable

IDS = (5, 6, 7)
NOISE = 3e-4


def checked(params: SamplingParams, plain: Reply, other: Reply) -> dict[str, RuleCheck]:
    asked = Asked("a case", 1, Question("hello", params), False, Answer.of(plain), Answer.of(other))
    return {check.rule: check for check in check_rules([asked], "token ids", NOISE)}


def scored(*logprobs: float) -> Reply:
    return Reply("a b c", IDS, tuple(ScoredToken("a", value) for value in logprobs) or None)


@pytest.mark.parametrize(
    ("given", "broken"),
    [((-0.5, -1.0, -2.0), 0), ((), 3), ((-0.5,), 2), ((-0.5, -1.0, float("nan")), 1), ((-0.5, -1.0, -2.5), 1)],
)
def test_log_probabilities_that_are_missing_with_speculation_are_broken(given: tuple[float, ...], broken: int) -> None:
    check = checked(LOGPROBS.params, scored(-0.5, -1.0, -2.0), scored(*given))["log-probabilities"]
    assert (check.answers, check.broken, check.honoured) == (3, broken, True)


def test_log_probabilities_that_the_plain_side_does_not_give_are_no_rule() -> None:
    assert not checked(LOGPROBS.params, scored(), scored(-0.5))["log-probabilities"].honoured


@pytest.mark.parametrize(
    ("params", "rule", "changes"),
    [
        (SamplingParams(temperature=0), "text", {"reasoning": "so, not"}),
        (SamplingParams(temperature=0, stop=("not",)), "stop", {"reasoning": "so, not"}),
    ],
)
def test_the_text_of_a_reasoning_parser_keeps_the_rules_of_an_answer(
    params: SamplingParams, rule: str, changes: dict[str, Any]
) -> None:
    plain = Reply("", IDS, reasoning="so")
    assert not checked(params, plain, plain)[rule].broken
    assert checked(params, plain, Reply("", IDS, **changes))[rule].broken == 1


@pytest.mark.parametrize(
    ("text", "ended", "broken"),
    [('{ "answer": ', "length", 0), ('{ "answer": ', "stop", 1), ("I say ", "length", 1)],
)
def test_each_choice_keeps_the_rules_by_its_own_finish_reason(text: str, ended: str, broken: int) -> None:
    whole = Reply('{"answer": "no"}', IDS, finish_reason="stop")
    two = [replace(whole, choices=(whole, one)) for one in (whole, Reply(text, IDS, finish_reason=ended))]
    question = Question("hello", JSON.params, {**JSON.more, "n": 2})
    asked = Asked("n 2", 1, question, True, *map(Answer.of, two))
    found = {check.rule: check for check in check_rules([asked], "token ids", NOISE)}["response_format"]
    assert (found.broken, found.honoured) == (broken, True)


@pytest.mark.parametrize(
    ("other", "rule_kept", "tokens_agree"),
    [
        (Reply("a b", IDS, finish_reason="stop"), True, True),
        (Reply("a b", (*IDS, 8), finish_reason="stop"), True, True),  # the rest of the block behind the stop string
        (Reply("a b", IDS[:2], finish_reason="stop"), True, True),  # its tokens are left out
        (Reply("", IDS[:1], finish_reason="stop"), None, False),
        (Reply("", IDS, finish_reason="stop"), False, True),
        (Reply("a", (*IDS, 8), finish_reason="stop"), False, True),
        (Reply("a b", IDS, finish_reason="length"), False, True),
        (Reply("a c", (5, 9, 7), finish_reason="stop"), None, False),
    ],
)
def test_text_and_tokens_up_to_a_stop_string_are_the_plain_sides(
    other: Reply, rule_kept: bool | None, tokens_agree: bool
) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, stop=("z",))
    plain = Reply("a b", IDS, finish_reason="stop")
    check = checked(params, plain, other).get("text")
    assert (None if check is None else not check.broken) == rule_kept
    mine, theirs = comparable(STOP, Answer.of(plain), Answer.of(other))
    assert (mine == theirs) == tokens_agree

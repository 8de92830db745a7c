"""A difference is a near-tie only where the plain side itself says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_serve.client.endpoint import Reply, ScoredToken
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.tokens import AnswerPair, Kind, Piece, ScoredAnswer, classify

GREEDY = SamplingParams(temperature=0)
PLAIN: list[Piece] = [1, 2, 3]
OTHER: list[Piece] = [1, 2, 4]
NAMES = {3: "three", 4: "four", 0: "<end>"}


def scored(pieces: list[str | int], **logprobs: float) -> ScoredAnswer:
    name = NAMES[int(pieces[2])]
    return ScoredAnswer(pieces, name, logprobs.get(name, -0.7), logprobs)


def kind(plain: ScoredAnswer | None, other: ScoredAnswer | None, params: SamplingParams = GREEDY) -> tuple[Kind, Any]:
    return classify(AnswerPair(PLAIN, OTHER, plain, other), 2, params=params, noise=0.1)


def test_tokens_closer_than_the_noise_are_a_near_tie_and_others_a_fault() -> None:
    other = scored([1, 2, 4])
    assert kind(scored([1, 2, 3], three=-0.7, four=-0.75), other) == ("near-tie", pytest.approx(0.05))
    assert kind(scored([1, 2, 3], three=-0.7, four=-0.9), other) == ("fault", pytest.approx(0.2))


def test_a_token_that_is_not_among_the_best_is_a_fault_if_they_are_far_enough() -> None:
    other = scored([1, 2, 4])
    assert kind(scored([1, 2, 3], three=-0.7, five=-0.8, six=-2.0), other) == ("fault", pytest.approx(1.3))
    assert kind(scored([1, 2, 3], three=-0.7, five=-0.75), other)[0] == "unscored"


def test_another_token_under_the_same_name_is_no_near_tie() -> None:
    """A server that replaces token ids, and not their names, was called lossless."""
    liar = ScoredAnswer([1, 2, 4], "three", -0.7, {})
    assert kind(scored([1, 2, 3], three=-0.1, four=-3.0), liar) == ("fault", pytest.approx(2.9))
    piece = "\N{REPLACEMENT CHARACTER}"  # also the name of many tokens that differ
    plain = ScoredAnswer([1, 2, 3], piece, -0.1, {"four": -3.0})
    assert kind(plain, ScoredAnswer([1, 2, 4], piece, -0.1, {}))[0] == "unscored"


@pytest.mark.parametrize("piece", ["", "\N{REPLACEMENT CHARACTER}"])  # vLLM 0.32 writes nothing
def test_tokens_that_are_no_whole_character_share_a_name_and_prove_no_fault(piece: str) -> None:
    both = ScoredAnswer([1, 2, 3], piece, -0.7, {piece: -0.75, "five": -4.0})
    assert kind(both, ScoredAnswer([1, 2, 4], piece, -0.7, {}))[0] == "unscored"
    other = ScoredAnswer([1, 2, 3], "three", -0.7, {"three": -0.7, piece: -5.0, "five": -4.0})  # piece: the worst one's
    assert kind(other, ScoredAnswer([1, 2, 4], piece, -0.7, {}))[0] == "unscored"
    assert kind(other, None)[0] == "unscored"


def test_a_side_that_cannot_say_it_again_is_not_guessed_at() -> None:
    plain = scored([1, 2, 3], three=-0.7, four=-0.71)
    assert kind(None, scored([1, 2, 4]))[0] == "unscored"
    assert kind(scored([1, 9, 3], three=-0.7), scored([1, 2, 4]))[0] == "unstable"
    assert kind(plain, scored([1, 2, 3]))[0] == "unscored"  # the other token's name is unknown, the best are close
    far = scored([1, 2, 3], three=-0.1, four=-3.0)
    assert kind(far, None) == ("fault", pytest.approx(2.9))  # whatever it was, it was not the best


def test_a_plain_side_that_flips_by_itself_still_gives_the_gap() -> None:
    flipped = scored([1, 2, 4], three=-0.71, four=-0.7)
    assert kind(flipped, scored([1, 2, 3]))[0] == "near-tie"


def test_a_plain_side_that_now_gives_the_other_token_shows_that_rounding_decides() -> None:
    assert kind(scored([1, 2, 4], four=-0.7), None) == ("near-tie", None)
    assert kind(scored([1, 2, 0], **{"<end>": -0.7}), None) == ("unstable", None)


def test_a_plain_side_that_now_gives_a_third_token_is_asked_for_both_names() -> None:
    third = ScoredAnswer([1, 2, 5], "five", -0.7, {"three": -0.72, "four": -0.75})
    assert kind(third, None) == ("unstable", None)
    assert kind(replace(third, spelt=["three", "four"]), None) == ("near-tie", pytest.approx(0.03))
    far = ScoredAnswer([1, 2, 5], "five", -0.1, {"three": -2.0, "four": -4.0}, ["three", "four"])
    assert kind(far, None)[0] == "unstable"  # its first answer was not its own best token: nothing to compare with


def test_the_plain_side_spells_a_token_that_the_other_one_does_not_repeat() -> None:
    plain, other = scored([1, 2, 3], three=-0.7, five=-0.75, four=-0.78), scored([1, 2, 3])
    assert kind(plain, other)[0] == "unscored"
    assert kind(replace(plain, spelt=[None, "four"]), other) == ("near-tie", pytest.approx(0.08))
    assert kind(replace(plain, spelt=[None, "six"]), other)[0] == "unscored"  # not among the best, which are close
    liar = ScoredAnswer([1, 2, 4], "five", -0.7, {})
    far = scored([1, 2, 3], three=-0.1, five=-0.15, four=-3.0)
    assert kind(far, liar)[0] == "near-tie"
    assert kind(replace(far, spelt=[None, "four"]), liar) == ("fault", pytest.approx(2.9))


def test_an_end_is_a_token_like_any_other() -> None:
    plain, other = scored([1, 2, 3], three=-0.7, **{"<end>": -0.72}), scored([1, 2, 0])
    found: tuple[Kind, Any] = classify(AnswerPair([1, 2, 3], [1, 2], plain, other), 2, params=GREEDY, noise=0.1)
    assert found == ("near-tie", pytest.approx(0.02))
    assert AnswerPair([1, 2, 3], [1, 2]).position == 2
    assert AnswerPair([1], [1]).position is None


def test_penalties_count_as_they_were_applied() -> None:
    params = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    plain = ScoredAnswer([4, 4, 3], "three", -1.7, {"four": -0.7})  # raw: four leads by 1, and is penalised by 1
    pair = AnswerPair([4, 4, 3], [4, 4, 4], plain, ScoredAnswer([4, 4, 4], "four", -0.7, {}))
    found: tuple[Kind, Any] = classify(pair, 2, params=params, noise=0.1)
    assert found == ("near-tie", pytest.approx(0.0))


def test_a_score_is_read_at_the_position_in_question_and_survives_the_store() -> None:
    answer = Reply("ab", (7, 8), (ScoredToken("a", -1.0), ScoredToken("b", -2.0, (("c", -3.0),))))
    found = ScoredAnswer.of(answer, 1)
    assert found == ScoredAnswer([7, 8], "b", -2.0, {"c": -3.0})
    assert found is not None
    assert ScoredAnswer(**json.loads(json.dumps(vars(found)))) == found
    assert ScoredAnswer.of(answer, 2) is None
    assert ScoredAnswer.of(answer, 3, [5, 6]) == ScoredAnswer([5, 6, 7, 8], "b", -2.0, {"c": -3.0})
    assert ScoredAnswer.of(Reply("ab"), 0) is None

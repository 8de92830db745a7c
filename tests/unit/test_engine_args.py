"""Arguments that are an engine's own: read from words and keys alike, and told off where they are not its, or ours."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from dflash_serve.adapter.arguments import ArgumentTable, EngineParser, add_flag, from_words
from dflash_serve.errors import UserError


def parser() -> EngineParser:
    made = EngineParser()
    add_flag(made, ["--mem-fraction-static"], "mem_fraction_static", type="float")
    add_flag(made, ["--tp-size", "--tensor-parallel-size"], "tp_size", type="int")
    add_flag(made, ["--sizes"], "sizes", takes="+", type="int")
    add_flag(made, ["--trust-remote-code"], "trust_remote_code", takes=0)
    add_flag(made, ["--overlap", "--no-overlap"], "overlap", takes=0)
    add_flag(made, ["--policy"], "policy", choices=["lpm", "fcfs"])
    add_flag(made, ["--rank"], "rank", type="int", choices=["1", "64"])
    return made


TABLE = ArgumentTable("acme", "Acme 1.0", parser, {"tp_size": "parallel.tensor", "policy": "the moon sets it"})


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--a", "1", "--b", "--c=2"], {"a": "1", "b": True, "c": "2"}),
        (["--sizes", "1", "2", "-3"], {"sizes": ["1", "2", "-3"]}),
        ([], {}),
    ],
)
def test_words_after_two_dashes_are_read_as_keys(words: list[str], given: dict[str, JsonValue]) -> None:
    assert from_words(words) == given


@pytest.mark.parametrize(("words", "said"), [(["1"], "not a flag"), (["--a", "1", "--a", "2"], "given twice")])
def test_words_that_are_no_flags_are_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_words(words)


def test_keys_become_the_engines_own_spelling() -> None:
    given: dict[str, JsonValue] = {"mem_fraction_static": 0.9, "trust-remote-code": True, "sizes": [1, 2]}
    words = ["--mem-fraction-static", "0.9", "--trust-remote-code", "--sizes", "1", "2"]
    assert TABLE.words(given) == words
    assert TABLE.problems(given) == []


def test_a_number_is_one_of_the_choices_however_the_list_writes_them() -> None:
    assert TABLE.problems({"rank": 64}) == TABLE.problems({"rank": "1"}) == []
    assert "invalid choice: 2 (choose from 1, 64)" in str(TABLE.problems({"rank": 2})[0])


def test_false_turns_a_flag_off_in_its_own_words() -> None:
    assert TABLE.words({"trust-remote-code": False, "overlap": False}) == ["--no-overlap"]
    assert TABLE.words({"no_overlap": False}) == ["--overlap"]
    assert TABLE.words({"no_overlap": True}) == ["--no-overlap"]


@pytest.mark.parametrize(
    ("given", "where", "said"),
    [
        ({"mem-fraction-statc": 0.9}, "engine_args.acme.mem-fraction-statc", "did you mean mem-fraction-static?"),
        ({"tp-size": 2}, "engine_args.acme.tp-size", "set parallel.tensor"),
        ({"tensor_parallel_size": 2}, "engine_args.acme.tensor_parallel_size", "set parallel.tensor"),
        ({"policy": "lpm"}, "engine_args.acme.policy", "leave it out: the moon sets it"),
        ({"mem-fraction-static": "much"}, "engine_args.acme", "invalid float value: 'much'"),
        ({"sizes": []}, "engine_args.acme", "expected at least one argument"),
        (
            {"overlap": True, "no-overlap": True},
            "engine_args.acme.no-overlap",
            "the same argument of Acme 1.0 as overlap",
        ),
    ],
)
def test_what_is_not_the_users_to_give_is_refused(given: dict[str, JsonValue], where: str, said: str) -> None:
    (problem,) = TABLE.problems(given)
    assert problem.where == where
    assert said in str(problem)


def test_every_one_is_told_not_the_first() -> None:
    assert len(TABLE.problems({"tp-size": 2, "nothing": 1, "mem-fraction-static": 0.5})) == 2

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve import SamplingParams
from dflash_serve.answers.engine import Chunk
from dflash_serve.errors import UserError
from dflash_torch.answer import PendingAnswer
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.grammar import Grammar, Grammars
from dflash_torch.scheduler import Scheduler
from tests.support.embedded import answers, tiny_engine
from tests.support.tiny_target import EOS

Folders = tuple[Path, Path]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(folders: Folders) -> EmbeddedEngine:
    return tiny_engine(folders)


@pytest.fixture(scope="module")
def grammars(engine: EmbeddedEngine) -> Grammars:
    return Grammars(engine.tokenizer, engine.scheduler.target.config.vocab_size, [EOS])


def run(
    engine: EmbeddedEngine, scheduler: Scheduler, grammar: Grammar, params: SamplingParams
) -> tuple[list[int], str]:
    answer = PendingAnswer(0, [5, 6, 7], params, lambda *_: None, grammar=grammar)
    request = answer.join(scheduler, engine.tokenizer)
    chunks: list[Chunk] = []
    while scheduler.running:
        chunks += [answer.advance(result) for result in scheduler.step()]
    assert chunks[-1].finish_reason == "stop"
    return request.output_ids, answer.text


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_matches_its_schema_and_is_the_one_without_speculation(
    folders: Folders, engine: EmbeddedEngine, grammars: Grammars, temperature: float
) -> None:
    plain = tiny_engine(folders, width=1).scheduler
    for seed in range(4):
        params = SamplingParams(temperature=temperature, seed=seed, ignore_eos=True, max_tokens=200)
        tokens, text = run(engine, engine.scheduler, grammars.json_schema(SCHEMA), params)
        value = json.loads(text)
        assert isinstance(value["a"], int)
        assert value["b"] in ("x", "yy")
        assert run(engine, plain, grammars.json_schema(SCHEMA), params) == (tokens, text)


def test_drafts_are_masked_so_a_forced_part_is_accepted_whole(engine: EmbeddedEngine, grammars: Grammars) -> None:
    """A random drafter is never right, but where the grammar leaves one token it has to be."""
    request = engine.scheduler.join([5], SamplingParams(temperature=0), grammar=grammars.regex("~#~#~#~#~#~#"))
    while engine.scheduler.running:
        engine.scheduler.step()
    assert (request.statistics.acceptance_length or 0) > 2


def test_neighbours_of_a_grammar_are_left_alone(engine: EmbeddedEngine, grammars: Grammars, folders: Folders) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    alone = answers(tiny_engine(folders), [[9, 8]], greedy)
    free = engine.scheduler.join([9, 8], greedy)
    engine.scheduler.join([5], greedy, grammar=grammars.regex("[a-z]{8}"))
    while engine.scheduler.running:
        engine.scheduler.step()
    assert free.output_ids == alone[0].token_ids


def deep(levels: int) -> dict[str, object]:
    return {"type": "object", "properties": {"a": deep(levels - 1)}} if levels else {"type": "object"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"type": "nonsense"}, "cannot be enforced"),
        ({"$ref": "http://x/y"}, "cannot be enforced"),
        ({"a": {"$ref": "#/no"}} | {"$ref": "#/a"}, "cannot be enforced"),
        (deep(200), "deep"),
        ("a" * 70000, "at most 65536"),
        ("(", "cannot be enforced"),
        (r"(?=a)b", "cannot be enforced"),
    ],
)
def test_what_cannot_be_a_grammar_is_a_users_mistake(
    grammars: Grammars, source: dict[str, object] | str, says: str
) -> None:
    with pytest.raises(UserError, match=rf"response_format: .*{says}"):
        grammars.regex(source) if isinstance(source, str) else grammars.json_schema(source)


def test_a_tokens_bytes_are_known_even_where_it_is_part_of_a_character(
    engine: EmbeddedEngine, grammars: Grammars
) -> None:
    tokens = engine.tokenize("é!")
    assert b"".join(grammars.token_bytes(token) for token in tokens) == "é!".encode()

"""The engine's promises to the core: streams side by side, comparisons, and controls for an evaluation."""

from __future__ import annotations

import gc
from itertools import zip_longest
from pathlib import Path
from unittest.mock import Mock

import pytest

from dflash_serve import SamplingParams
from dflash_serve.backend import Chunk
from dflash_serve.errors import UserError
from dflash_torch.engine import EmbeddedEngine, EngineStream
from tests.support.embedded import PROMPTS, tiny_engine

Folders = tuple[Path, Path]
Truth = dict[tuple[int, ...], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def started(engine: EmbeddedEngine, *prompts: str) -> EngineStream:
    return engine.stream(prompts, [GREEDY] * len(prompts))


def alone(folders: Folders, truth: Truth, *prompts: str) -> list[Chunk]:
    return list(started(tiny_engine(folders, truth=truth), *prompts))


def text(chunks: list[Chunk]) -> list[str]:
    """The text of each prompt."""
    return ["".join(c.text for c in chunks if c.index == index) for index in range(max(c.index for c in chunks) + 1)]


@pytest.mark.parametrize("entries", [1, 2, 4])
def test_two_streams_in_turns_give_what_each_gives_alone(folders: Folders, truth: Truth, entries: int) -> None:
    engine = tiny_engine(folders, truth=truth, max_batch_size=entries)
    one, two = started(engine, *PROMPTS[:2]), started(engine, *PROMPTS[2:])
    pairs = list(zip_longest(one, two))
    first, second = ([chunk for pair in pairs if (chunk := pair[side]) is not None] for side in (0, 1))
    assert text(first) == text(alone(folders, truth, *PROMPTS[:2]))
    assert text(second) == text(alone(folders, truth, *PROMPTS[2:]))
    assert [output.token_ids for output in [*one.outputs(), *two.outputs()]] == list(truth.values())


def test_prompts_of_all_streams_are_admitted_in_order_of_arrival(folders: Folders) -> None:
    engine = tiny_engine(folders, max_batch_size=1)
    one, two, three = (started(engine, prompt) for prompt in PROMPTS[:3])
    assert list(three)[-1].finish_reason == "length"  # the last comer's answer needs those before it
    one.close()  # its finished request stays
    assert len(one.outputs()) == len(two.outputs()) == 1
    assert engine.scheduler.joined == 3


@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("dropped", [False, True])
def test_closing_a_stream_ends_its_own_requests_only(
    folders: Folders, truth: Truth, entries: int, dropped: bool
) -> None:
    engine = tiny_engine(folders, truth=truth, max_batch_size=entries)
    one, two = started(engine, *PROMPTS[:2]), started(engine, PROMPTS[2])
    next(one)
    if dropped:
        del one
        gc.collect()
    else:
        one.close()
        assert list(one) == []
    assert len(engine.scheduler.free_entries) == entries
    assert text(list(two)) == text(alone(folders, truth, PROMPTS[2]))
    assert not engine.scheduler.running
    assert engine.scheduler.joined <= entries + 1, "a closed stream's waiting prompts never run"


@pytest.mark.parametrize("cause", [IndexError, KeyboardInterrupt])
def test_a_step_that_fails_ends_what_ran_in_it_and_the_engine_goes_on(
    folders: Folders, truth: Truth, monkeypatch: pytest.MonkeyPatch, cause: type[BaseException]
) -> None:
    engine = tiny_engine(folders, truth=truth, max_batch_size=1)
    one, two = started(engine, PROMPTS[0]), started(engine, PROMPTS[1])
    next(one)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "step", Mock(side_effect=cause))
        if not issubclass(cause, Exception):  # the interrupt goes on
            with pytest.raises(cause):
                list(one)
        with pytest.raises(RuntimeError, match="a step of the engine failed") as failed:
            list(one)
    assert isinstance(failed.value.__cause__, cause)
    assert len(engine.scheduler.free_entries) == 1
    assert text(list(two)) == text(alone(folders, truth, PROMPTS[1]))


def test_a_prompt_that_does_not_fit_queues_nothing_of_its_stream(folders: Folders) -> None:
    engine = tiny_engine(folders)
    with pytest.raises(UserError, match="256 tokens"):
        engine.stream([PROMPTS[0], [1] * 256], [GREEDY] * 2)
    list(started(engine, PROMPTS[0]))
    assert engine.scheduler.joined == 1


def test_a_fixed_width_is_every_steps_width(folders: Folders, truth: Truth) -> None:
    engine = tiny_engine(folders, truth=truth).fixed(3)
    stream = started(engine, *PROMPTS)
    list(stream)
    widths = [set(output.statistics.widths or ()) for output in stream.outputs()]
    assert all(3 in found and max(found) == 3 for found in widths)
    assert [output.token_ids for output in stream.outputs()] == list(truth.values())


def test_controls_change_drafts_and_no_answer(folders: Folders, truth: Truth) -> None:
    engine = tiny_engine(folders)
    for fault in engine.controls:
        stream = started(engine.fixed(4, fault), *PROMPTS)
        list(stream)
        assert [output.token_ids for output in stream.outputs()] == list(truth.values())


def test_a_fixed_engine_leaves_the_drafters_context_of_its_original_alone(folders: Folders) -> None:
    engine, undisturbed = tiny_engine(folders), tiny_engine(folders)
    mine, expected = started(engine, *PROMPTS), started(undisturbed, *PROMPTS)
    next(mine)
    list(started(engine.fixed(4, "features zeroed"), *reversed(PROMPTS)))
    list(mine), list(expected)
    assert [o.statistics for o in mine.outputs()] == [o.statistics for o in expected.outputs()]


@pytest.mark.parametrize(
    ("width", "fault", "says"), [(5, None, "1 to 4 slots"), (0, None, "1 to 4 slots"), (4, "gremlins", "no 'gremlins'")]
)
def test_a_width_or_fault_that_is_none_is_a_users_mistake(
    folders: Folders, width: int, fault: str | None, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        tiny_engine(folders).fixed(width, fault)
    with pytest.raises(UserError, match="drafter"):
        tiny_engine(folders, width=1).fixed(4)

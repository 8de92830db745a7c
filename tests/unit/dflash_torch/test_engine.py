"""The engine's promises to the core: streams side by side, comparisons, and controls for an evaluation."""

from __future__ import annotations

import gc
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_serve import SamplingParams
from dflash_serve.answers.engine import Chunk
from dflash_serve.errors import UserError
from dflash_torch.engine import EmbeddedEngine, EngineStream
from dflash_torch.model_runner import Runner
from dflash_torch.scheduler import Scheduler
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes

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


class Allocated(TorchDispatchMode):
    """Counts bytes of the tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self.bytes += tensor.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("static", [False, True], ids=["ragged", "padded"])
def test_engines_for_comparison_share_the_caches_of_their_original_and_answer_as_it_does(
    folders: Folders, truth: Truth, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Runner.__init__
    monkeypatch.setattr(
        Runner, "__init__", lambda self, cache, **more: begin(self, cache, **{**more, "static": static})
    )
    monkeypatch.setattr(Scheduler, "prepare", lambda _: None)  # captures take memory of their own
    engine = tiny_engine(folders)
    full = engine.scheduler.cache.keys.nbytes
    with Allocated() as allocated:
        made = [engine, engine.plain(), engine.fixed(3), engine.fixed(4, "features zeroed")]
    assert allocated.bytes < full / 20
    short = GREEDY.model_copy(update={"max_tokens": 8})
    for each in (*made, *made[:2]):
        found = answers(each, PROMPTS[:3], short)
        assert [output.token_ids for output in found] == [answer[:8] for answer in truth.values()][:3]


@pytest.mark.parametrize("prompts", [1, 4])
def test_engines_that_share_a_cache_answer_one_after_the_other(folders: Folders, truth: Truth, prompts: int) -> None:
    engine = tiny_engine(folders, truth=truth, max_batch_size=4)
    plain = engine.plain()
    mine, early = started(engine, *PROMPTS[:prompts]), started(plain, PROMPTS[4])
    begun = [next(mine)]
    for misused in (lambda: next(early), lambda: engine.fixed(3), engine.plain):
        with pytest.raises(UserError, match="still answers; read its streams to their ends, or close them"):
            misused()
    assert text([*begun, *mine]) == text(alone(folders, truth, *PROMPTS[:prompts])), "it is not disturbed"
    assert text(list(started(plain, PROMPTS[4]))) == text(alone(folders, truth, PROMPTS[4]))
    left = started(plain, *PROMPTS)
    next(left)
    left.close()
    assert text(list(started(engine, PROMPTS[0]))) == text(alone(folders, truth, PROMPTS[0]))


def test_an_engine_reuses_no_prefix_that_another_one_computed_or_overwrote(folders: Folders) -> None:
    engine = tiny_engine(folders)
    plain, prompt = engine.plain(), list(range(10, 50))

    def reused(by: EmbeddedEngine) -> list[int]:  # by two answers to one prompt, one after the other
        found = []
        for _ in range(2):
            request = by.scheduler.join(prompt, GREEDY)
            while by.scheduler.running:
                by.scheduler.step()
            found.append(request.reused)
        return found

    assert [reused(each) for each in (engine, plain, engine, engine.fixed(4), plain)] == [
        *[[0, 39]] * 3,
        [0, 0],
        [0, 39],
    ]
    assert reused(plain) == [39, 39], "nothing ran in between"


@pytest.mark.parametrize("fault", ["features zeroed", "layer ids +1"])
def test_a_fixed_engine_leaves_the_drafters_context_of_its_original_alone(folders: Folders, fault: str) -> None:
    engine, undisturbed = with_passes(tiny_engine(folders), static=True), tiny_engine(folders)
    spoilt = engine.fixed(4, fault)
    list(started(spoilt, PROMPTS[1]))
    assert spoilt.scheduler.speculator is not None
    for tensor in (spoilt.scheduler.speculator.cache.keys, spoilt.scheduler.speculator.cache.values):
        tensor.fill_(float("nan"))  # as an overflow leaves it
    mine, expected = started(engine, *PROMPTS[:2]), started(undisturbed, *PROMPTS[:2])
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

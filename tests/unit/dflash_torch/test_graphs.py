"""CUDA graphs, played on a CPU: engines in turns, and batches of which some requests need the host."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_serve import SamplingParams
from dflash_serve.models.kv_cache import Span
from dflash_serve.speculation.policy import FixedWidth, Step
from dflash_torch import calibration, model_runner
from dflash_torch.block_step import BlockSteps
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.grammar import Grammars
from dflash_torch.model_runner import Runner, Shapes, StaticPass, sizes
from dflash_torch.request import Request
from dflash_torch.scheduler import Scheduler
from tests.support.device_calls import capture_passes
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes
from tests.support.tiny_target import EOS

Folders = tuple[Path, Path]
Truth = dict[tuple[int, ...], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine pads and captures its passes."""
    begin = Runner.__init__
    monkeypatch.setattr(
        Runner, "__init__", lambda self, *given, **named: begin(self, *given, **named | {"static": True})
    )
    capture_passes(monkeypatch)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("prepared", [True, False])
def test_engines_in_turns_answer_as_each_does_alone(folders: Folders, truth: Truth, prepared: bool) -> None:
    """As benchmarks run them: a step of one engine is in flight while another captures and replays its own graphs."""

    def engine() -> EmbeddedEngine:
        return tiny_engine(folders, truth=truth, reuse_prefixes=False)

    # Each with a K/V cache of its own: engines that share one answer one after the other.
    engines = {
        "full": engine(),
        "off": engine().plain(),
        "fixed": engine().fixed(4),
        "fault": engine().fixed(4, fault="features zeroed"),
    }
    engines["off"].scheduler.cache_manager.reuse = False
    if prepared:
        engines["full"].scheduler.prepare()
    params = GREEDY.model_copy(update={"max_tokens": 16})
    for chunks in (1, 5):
        streams = {name: engine.stream(PROMPTS[:3], [params] * 3) for name, engine in engines.items()}
        running, found = list(streams), {name: [list[int]() for _ in range(3)] for name in streams}
        while running:
            for name in running.copy():
                turn = list(islice(streams[name], chunks))
                for chunk in turn:
                    found[name][chunk.index] += chunk.token_ids
                if not turn:
                    running.remove(name)
        assert found == {name: [answer[:16] for answer in list(truth.values())[:3]] for name in engines}


class AnyWidth:
    """Any width, at random, for each request its own."""

    paused = False

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        return [self.chance.randint(1, 4) for _ in request_ids]

    def observe(self, step: Step) -> None:
        assert all(0 <= accepted < width for accepted, width in zip(step.accepted, step.widths, strict=True))

    def forget(self, request_id: Hashable) -> None:
        pass


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_of_every_kind_that_join_and_leave_change_no_answer(
    folders: Folders, truth: Truth, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some need the host, some have a long context, some cannot be drafted for; all others run in captured steps."""
    monkeypatch.setattr(model_runner, "SHORTEST", 32)
    found = []
    for captured in (False, True):
        engine = with_passes(tiny_engine(folders, width=AnyWidth(seed), truth=truth), static=captured)
        chance, scheduler, requests = random.Random(seed), engine.scheduler, list[Request]()
        if captured:
            capture_passes(monkeypatch)
        loads = [load(engine, chance, n) for n in range(9)]
        joins = [chance.randint(0, 3) for _ in loads]  # steps between two of them
        while loads or scheduler.running:
            while loads and scheduler.free_entries and (joins[0] <= 0 or not scheduler.running):
                joins.pop(0)
                requests.append(scheduler.join(*loads.pop(0)))
                requests[-1].draftable = len(requests) % 5 > 0
            if joins:
                joins[0] -= 1
            scheduler.step()
        found.append([request.output_ids for request in requests])
    assert found[0] == found[1]


def load(engine: EmbeddedEngine, chance: random.Random, n: int) -> tuple[list[int], SamplingParams]:
    """The prompt and parameters of one request, at random."""
    kind: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.0, 0.8]),
        "top_p": chance.choice([1.0, 0.9]),
        "repetition_penalty": chance.choice([1.0, 1.0, 1.0, 1.2]),
        "logprobs": chance.choice([None, None, None, 1]),
        "min_tokens": chance.choice([0, 0, 4]),
        "max_tokens": chance.randint(4, 20),
    }
    prompt = engine.tokenize(chance.choice(PROMPTS))
    return prompt * chance.choice([1, 1, 20]), SamplingParams(**kind, ignore_eos=True, seed=n)


ODD: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 1},
    "penalty": {"presence_penalty": 1.0},
    "biased": {"logit_bias": {5: 1.0}},
    "grammar": {},
    "not draftable": {},
    "long": {},
}


@pytest.mark.parametrize(("odd", "width"), [*((odd, 4) for odd in ODD), ("logprobs", 1), ("long", 1)])
def test_one_request_leaves_the_others_on_steps_that_are_launched_ahead(
    folders: Folders, truth: Truth, odd: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "SHORTEST", 32)
    prompts = [list(prompt) for prompt in list(truth)[:3]]
    found, launches = [], list[tuple[set[int], int]]()
    launch = BlockSteps.launch

    def noted(self: BlockSteps, requests: Sequence[Request], *given: Any) -> Any:
        steps = launch(self, requests, *given)
        launches.append(({request.id for request in requests}, len(steps)))
        return steps

    for captured in (False, True):
        policy = FixedWidth(width)
        engine = with_passes(tiny_engine(folders, width=policy, truth=truth, reuse_prefixes=False), static=captured)
        scheduler, grammar = engine.scheduler, None
        if captured:
            capture_passes(monkeypatch)
            monkeypatch.setattr(BlockSteps, "launch", noted)
        if odd == "grammar":
            vocab_size = scheduler.target.config.vocab_size
            grammar = Grammars(engine.tokenizer, vocab_size, [EOS]).json_schema({"type": "string", "minLength": 30})
        last = prompts[0] * 30 if odd == "long" else prompts[0]
        requests = [scheduler.join(prompt, GREEDY) for prompt in prompts]
        requests.append(scheduler.join(last[:180], GREEDY.model_copy(update=ODD[odd]), grammar=grammar))
        requests[-1].draftable = odd != "not draftable"
        for _ in range(8):
            scheduler.step()
        launched = launches.copy()
        while scheduler.running:
            scheduler.step()
        found.append([request.output_ids for request in requests])
    assert found[0] == found[1]
    others, on_host = {0, 1, 2}, odd in ("logprobs", "penalty", "biased", "grammar")
    assert len(launched) >= 7, "each step after the prompts"
    assert all(ids == (others if on_host else others | {3}) for ids, _ in launched)
    assert {count for _, count in launched} == ({2} if odd == "long" else {1})


@pytest.mark.parametrize(
    ("entries", "block", "capacity", "before"),
    [(4, 16, 40960, 195), (32, 16, 8192, 390), (64, 16, 4096, 455), (128, 16, 2048, 520)],
)
def test_all_contexts_have_a_captured_shape_and_there_are_fewer_graphs(
    entries: int, block: int, capacity: int, before: int
) -> None:
    """`before`: the graphs of a start when contexts beyond 4,096 tokens had none."""
    shapes = Shapes(entries, block, capacity + block)
    for start in range(0, capacity, 97):
        assert shapes.fit([Span(0, start, block)] * entries) in set(shapes.all())
    found = shapes.all()
    steps = len(found) + sum(shape.width == 1 for shape in found)  # without a draft: with features, and without
    choices = len({shape[:2] for shape in found})
    assert steps + choices < before
    assert len(shapes.all([block])) * (block.bit_length()) == len(found)


def test_long_contexts_run_apart_where_padding_the_short_ones_costs_more_than_a_pass() -> None:
    shapes = Shapes(32, 16, 8208, pass_keys=36_000)
    short, long = Span(0, 500, 16), Span(0, 8000, 16)
    assert shapes.parts([*[short] * 20, long, *[short] * 11]) == [[*range(20), *range(21, 32)], [20]]
    assert shapes.parts([short, long]) == [[0, 1]]
    assert shapes.parts([long] * 32) == [list(range(32))]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("width", "captured"), [(1, {1}), (3, {4}), (4, {4})])
def test_a_fixed_width_captures_its_own_shapes_alone(folders: Folders, width: int, captured: set[int]) -> None:
    engine = tiny_engine(folders, width=FixedWidth(width), reuse_prefixes=False)
    engine.scheduler.prepare()
    passes = engine.scheduler.target_runner.captured
    assert {shape.width for shape, _ in passes} == captured
    ahead = set(passes)
    prompts = [[*range(5, 15)], [*range(8, 20)]]
    for temperature in (0.0, 0.8):  # sampled steps have the same graphs
        answers(engine, prompts, GREEDY.model_copy(update={"temperature": temperature, "seed": 1}))
    assert set(passes) == ahead
    assert len({id(work.pool) for work in passes.values()}) == 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_costs_are_those_of_steps_that_are_launched_ahead(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "REPETITIONS", 2)
    monkeypatch.setattr(calibration, "MOST_REPETITIONS", 2)
    on_host = list[int]()
    monkeypatch.setattr(Scheduler, "_run", lambda _, requests: on_host.append(len(requests)))
    called = dict[int, int]()
    replay = StaticPass.__call__

    def noted(work: StaticPass, *inputs: Any) -> Any:
        called[len(inputs[0])] = called.get(len(inputs[0]), 0) + 1
        return replay(work, *inputs)

    monkeypatch.setattr(StaticPass, "__call__", noted)
    speculator = tiny_engine(folders).scheduler.speculator
    assert speculator is not None
    cost = calibration.measure(speculator.target, speculator.drafter, speculator.block_size, 2).cost
    assert not on_host
    assert set(called) == set(sizes(1, 2))
    assert set(cost.target) == {1, 2, 4, 8}
    assert set(cost.draft) == {1, 2}


def test_a_capture_runs_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that changes a tensor outside the pool changes it once, although its first call warms up and records."""
    capture_passes(monkeypatch)
    state = torch.zeros(2)

    def work(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + state.add_(1),)

    adds = StaticPass(work, [state], model_runner.GraphPool(), [state])
    assert [adds(torch.full((2,), 10.0))[0].tolist() for _ in range(3)] == [[11.0] * 2, [12.0] * 2, [13.0] * 2]

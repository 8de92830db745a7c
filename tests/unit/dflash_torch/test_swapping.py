"""A drafter is replaced between two steps: no answer changes, none is lost, and nothing of the old one is used."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_serve import SamplingParams
from dflash_serve.adapter.last_run import KeptWidth, LastRun
from dflash_serve.answers.engine import RequestOutput
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_torch import swapping
from dflash_torch.engine import EmbeddedEngine, EngineStream
from dflash_torch.swapping import DrafterSwap, Swapped
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes
from tests.support.heads import HEADS
from tests.support.tiny import tiny_drafter_config, write_tiny_drafter

Folders = tuple[Path, Path]
Truth = dict[tuple[int, ...], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
EACH = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, presence_penalty=0.5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=40, ignore_eos=True),
]
"""Parameters of the answers in flight, one for each prompt."""


@pytest.fixture(scope="module")
def drafters(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters that fit the tiny target: plain, with a head, with other layers and other K/V; and some that do not."""
    root = tmp_path_factory.mktemp("drafters")
    config = json.loads((folders[0] / "config.json").read_text())
    fits = {"num_target_layers": 4, "target_layer_ids": (0, 2), "mask_token_id": 3, "vocab_size": config["vocab_size"]}
    kinds = {
        "plain": {},
        "markov": HEADS["vanilla Markov"],
        "other layers": {"target_layer_ids": (1, 2, 3)},
        "other K/V": {"num_key_value_heads": 1},
        "short blocks": {"block_size": 3},
        "deeper target": {"num_target_layers": 9, "target_layer_ids": (0, 8)},
        "other width": {"hidden_size": 64},
    }
    for seed, (name, changes) in enumerate(kinds.items(), start=1):
        dialect = "deepspec" if name == "markov" else "zlab"
        write_tiny_drafter(root / name, tiny_drafter_config(**{**fits, **changes}), seed=seed, dialect=dialect)
    (root / "empty").mkdir()
    spoilt = write_tiny_drafter(root / "spoilt", tiny_drafter_config(**fits))
    tensors = load_file(spoilt / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, spoilt / "model.safetensors", metadata={"format": "pt"})
    return root


def described(engine: EmbeddedEngine, folders: Folders) -> EmbeddedEngine:
    """The engine, with the deployment that would have started it."""
    engine.deployment = Deployment.model_validate(
        {
            "target": {"model": str(folders[0])},
            "drafter": {"model": str(folders[1])},
            "speculation": {"width": 4},
            "hardware": {"gpu": "none", "dtype": "float32"},
            "engine_args": {"torch": {"operators": "plain"}},
        }
    )
    return engine


def replaced(engine: EmbeddedEngine, swap: DrafterSwap, path: str | None) -> Swapped:
    """Loads a drafter in this thread, and has the engine's next step put it in place, as the server does."""
    loaded = swap.load(path)
    done = engine.loop.call(lambda: swap.put(loaded))
    engine.loop.step()
    return done.result(0)


def run_with_swaps(
    engine: EmbeddedEngine, swap: DrafterSwap, at: Sequence[tuple[int, str | None]]
) -> tuple[list[RequestOutput], list[Swapped]]:
    """Answers to `PROMPTS`, which are in flight when drafters are replaced after so many chunks."""
    stream: EngineStream = engine.stream(PROMPTS, EACH)
    waiting, done = list(at), list[Swapped]()
    for number, _ in enumerate(stream):
        if waiting and number >= waiting[0][0]:
            assert engine.scheduler.is_ahead == (engine.scheduler.target_runner.static and number > 0)
            done.append(replaced(engine, swap, waiting.pop(0)[1]))
    assert not waiting
    return stream.outputs(), done


@pytest.fixture(scope="module")
def expected(folders: Folders) -> list[list[int]]:
    engine = tiny_engine(folders, width=1)
    return [output.token_ids for output in answers(engine, PROMPTS, EACH)]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("first", [0, 3, 11])
def test_answers_in_flight_keep_every_token_and_lose_their_drafts(
    folders: Folders, drafters: Path, expected: list[list[int]], truth: Truth, first: int, static: bool
) -> None:
    """From a plain drafter to one with a head, to other layers, and back; greedy, seeded, penalised, with logprobs.

    With static passes a step is launched ahead: its tokens count, and its features are the old drafter's.
    """
    engine = described(tiny_engine(folders, truth=truth, max_batch_size=3), folders)
    swap = DrafterSwap(with_passes(engine, static=static), drafters)
    served, done = run_with_swaps(engine, swap, [(first, "markov"), (first + 9, "other layers"), (first + 20, None)])
    assert [output.token_ids for output in served] == expected
    assert [one.revision for one in done] == [1, 2, 3]
    assert [Path(one.drafter).name for one in done] == ["markov", "other layers", "markov"]
    assert done[0].undrafted + done[1].undrafted > 0
    assert len(swap.names) == 4


def test_a_request_after_the_exchange_is_drafted_for_by_the_new_drafter(
    folders: Folders, drafters: Path, truth: Truth
) -> None:
    """The old one knew the truth, so its acceptance is another one; counts of the two are kept apart."""
    engine = described(tiny_engine(folders, truth=truth), folders)
    swap = DrafterSwap(engine, drafters)
    before = answers(engine, PROMPTS[:2], GREEDY)
    stream = engine.stream(PROMPTS[2:3], [GREEDY])
    next(stream)
    assert replaced(engine, swap, "plain").undrafted == 1
    list(stream)
    (in_flight,) = stream.outputs()
    after = answers(engine, PROMPTS[:2], GREEDY)
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert {width for width, _ in in_flight.steps[4:]} == {1}
    assert all({width for width, _ in one.steps[:-3]} == {4} for one in after)
    scheduler = engine.scheduler
    (old,) = scheduler.earlier
    assert (old.acceptance_length or 0) > 2 > (scheduler.statistics.acceptance_length or 9)
    total = sum(len(one.steps) for one in (*before, in_flight, *after))
    assert (old.steps or 0) + (scheduler.statistics.steps or 0) == total


def test_no_prefix_from_before_the_exchange_is_reused(folders: Folders, drafters: Path) -> None:
    """Its context K/V is the old drafter's: a request that took the target's alone could not be drafted for."""
    engine = described(tiny_engine(folders), folders)
    swap, prompt = DrafterSwap(engine, drafters), list(range(10, 60))
    scheduler = engine.scheduler
    answers(engine, [prompt], GREEDY)
    running = engine.stream([[*prompt, 61]], [GREEDY])
    next(running)
    assert scheduler.running[0].reused >= 50
    replaced(engine, swap, "plain")
    first = scheduler.join([*prompt, 62], GREEDY)
    assert (first.reused, first.draftable) == (0, True)
    scheduler.step()
    second = scheduler.join([*prompt, 63], GREEDY)
    assert (second.reused, second.draftable) == (len(prompt), True)
    running.close()


def test_the_new_drafter_sees_the_context_that_it_would_see_after_a_restart(folders: Folders, drafters: Path) -> None:
    """Drafts are compared slot for slot, with the K/V cache that it took over from the drafter before it."""
    prompt = [list(range(10, 40))]
    engine = described(tiny_engine(folders), folders)
    answers(engine, PROMPTS, GREEDY)  # leaves K/V of the old drafter in every entry
    replaced(engine, DrafterSwap(engine, drafters), "plain")
    fresh = tiny_engine((folders[0], drafters / "plain"))
    assert answers(engine, prompt, GREEDY)[0].steps == answers(fresh, prompt, GREEDY)[0].steps


REFUSED = {
    "empty": "config.json",
    "no such": "no folder",
    "../": "no folder",
    "\0": "no folder",
    "deeper target": "layer",
    "other width": "hidden",
    "short blocks": "block_size 4 is larger than the drafter's 3",
    "spoilt": "fc.weight",
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_drafter_that_cannot_be_served_leaves_the_served_one(
    folders: Folders, drafters: Path, truth: Truth, path: str
) -> None:
    engine = described(tiny_engine(folders, truth=truth), folders)
    swap, served = DrafterSwap(engine, drafters), engine.scheduler.speculator
    stream = engine.stream(PROMPTS[:1], [GREEDY])
    next(stream)
    with pytest.raises(UserError, match=REFUSED[path]):
        swap.load(path)
    list(stream)
    assert engine.scheduler.speculator is served
    assert all(width == 4 for width, _ in stream.outputs()[0].steps[:-3])


def test_a_link_that_leaves_the_folder_is_refused(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "link").symlink_to(folders[1])
    swap = DrafterSwap(described(tiny_engine(folders), folders), tmp_path / "below")
    for path in ("link", str(folders[1])):
        with pytest.raises(UserError, match="may be loaded"):
            swap.load(path)


def test_without_the_memory_for_two_drafters_it_is_refused(
    folders: Folders, drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = described(tiny_engine(folders), folders)
    swap, served = DrafterSwap(engine, drafters), engine.scheduler.speculator
    monkeypatch.setattr(swapping, "free_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"needs 0\.0 GiB, 0\.0 GiB are free; restart the server with it"):
        swap.load("plain")
    monkeypatch.undo()

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(swapping, "Speculator", full)
    with pytest.raises(UserError, match="does not fit into memory"):
        swap.load("other K/V")  # needs a K/V cache of its own
    assert (engine.scheduler.speculator, engine.scheduler.earlier) == (served, ())


def test_a_drafter_with_other_sizes_of_its_cache_gets_one_of_its_own(folders: Folders, drafters: Path) -> None:
    engine = described(tiny_engine(folders), folders)
    swap, scheduler = DrafterSwap(engine, drafters), engine.scheduler
    assert scheduler.speculator is not None
    first = scheduler.speculator.cache
    replaced(engine, swap, "plain")
    assert scheduler.speculator.cache is first
    replaced(engine, swap, "other K/V")
    assert scheduler.speculator.cache.keys.shape[2] == 1
    answers(engine, PROMPTS, GREEDY)


def test_the_drafter_that_left_takes_no_memory(folders: Folders, drafters: Path) -> None:
    engine = with_passes(described(tiny_engine(folders), folders), static=True)
    swap = DrafterSwap(engine, drafters)
    answers(engine, PROMPTS, GREEDY)
    assert engine.scheduler.speculator is not None
    old = weakref.ref(engine.scheduler.speculator.drafter)
    replaced(engine, swap, "markov")
    gc.collect()
    assert old() is None


def test_it_is_taken_back_to_each_drafter_before(folders: Folders, drafters: Path) -> None:
    engine = described(tiny_engine(folders), folders)
    swap = DrafterSwap(engine, drafters)
    with pytest.raises(UserError, match="no drafter before"):
        swap.load(None)
    for name in ("plain", "markov", "markov"):  # the last one was written again
        replaced(engine, swap, name)
    assert [Path(replaced(engine, swap, None).drafter).name for _ in range(2)] == ["plain", folders[1].name]
    with pytest.raises(UserError, match="no drafter before"):
        swap.load(None)


def test_a_policy_begins_with_the_record_of_the_new_drafter_and_its_counters_only_rise(
    folders: Folders, drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cost = CostModel(target={1: 1.0, 4: 1.1, 16: 1.4}, draft={1: 0.1, 4: 0.2})
    engine = described(tiny_engine(folders), folders)
    assert engine.deployment is not None
    auto = engine.deployment.speculation.model_copy(update={"width": "auto"})
    engine.deployment = engine.deployment.model_copy(update={"speculation": auto})
    engine.scheduler.policy = served = KeptWidth(cost, 4, LastRun(folders[1], engine.deployment.target))
    LastRun(drafters / "plain", engine.deployment.target).keep([0.9, 0.8, 0.7])
    answers(engine, PROMPTS, GREEDY)
    replaced(engine, DrafterSwap(engine, drafters), "plain")
    policy = engine.scheduler.policy
    assert isinstance(policy, KeptWidth)
    assert policy.acceptance.overall() == pytest.approx([0.9, 0.8, 0.7], abs=0.05)
    assert (policy.pace, policy.times.measured) == (served.pace, cost)
    answers(engine, PROMPTS, GREEDY)

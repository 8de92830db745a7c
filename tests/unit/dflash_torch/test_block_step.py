"""Steps that are launched before the one before is read: the tokens of the ragged passes, at one wait a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_serve import SamplingParams
from dflash_serve.speculation import sampling
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth, WidthPolicy
from dflash_serve.speculation.width import AutoWidth
from dflash_torch.model_runner import TargetRunner
from tests.support.device_calls import capture_passes, device_calls
from tests.support.embedded import PROMPTS, answers, tiny_engine, with_passes
from tests.support.heads import HEADS
from tests.unit.dflash_torch.test_heads import BLOCK, pair_with

Folders = tuple[Path, Path]
Truth = dict[tuple[int, ...], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
LENGTHS = (3, 40, 1, 17, 2, 30, 29, 5)


def auto() -> AutoWidth:
    return AutoWidth(CostModel(target={1: 1.0, 16: 1.2}, draft={1: 0.1, 4: 0.2}), 4, [1, 2, 4])


LOADS: dict[str, list[SamplingParams]] = {
    "greedy": [GREEDY.model_copy(update={"max_tokens": count}) for count in LENGTHS],
    "sampled": [SAMPLED.model_copy(update={"max_tokens": count, "seed": count}) for count in LENGTHS],
    "top-p and top-k": [SAMPLED.model_copy(update={"top_p": 0.8, "top_k": 20, "seed": n}) for n in range(4)],
    "mixed": [GREEDY, SAMPLED, GREEDY.model_copy(update={"max_tokens": 7}), SAMPLED],
    "some need the host": [
        GREEDY,
        GREEDY.model_copy(update={"max_tokens": 5, "presence_penalty": 1.5}),
        SAMPLED.model_copy(update={"logprobs": 2, "max_tokens": 9}),
        GREEDY.model_copy(update={"min_tokens": 4, "ignore_eos": False}),
    ],
    "stop strings": [GREEDY.model_copy(update={"stop": ("o", "e")}), GREEDY, SAMPLED],
}
POLICIES: dict[str, Callable[[], WidthPolicy]] = {
    "off": lambda: FixedWidth(1),
    "narrow": lambda: FixedWidth(3),
    "fixed": lambda: FixedWidth(4),
    "auto": auto,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", LOADS)
def test_no_token_changes(folders: Folders, truth: Truth, load: str, policy: str) -> None:
    params = LOADS[load]
    prompts = [list(truth)[n % len(truth)] for n in range(len(params))]
    found = []
    for static in (False, True):
        made = tiny_engine(folders, width=POLICIES[policy](), max_batch_size=3, truth=truth)
        outputs = answers(with_passes(made, static=static), prompts, params)
        lengths = [one.statistics.acceptance_length for one in outputs if policy != "auto"]
        answered = [(one.token_ids, one.text, one.finish_reason, len(one.logprobs or [])) for one in outputs]
        found.append((answered, lengths))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["off", "narrow", "fixed", "auto"])
def test_a_captured_step_reads_its_static_inputs_alone(
    folders: Folders, truth: Truth, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a pass took from the host when it was captured would be the first step's in every later one."""
    found = []
    for captured in (False, True):
        made = tiny_engine(folders, width=POLICIES[policy](), max_batch_size=3, truth=truth)
        engine = with_passes(made, static=captured)
        if captured:
            capture_passes(monkeypatch)
        outputs = answers(engine, [list(prompt) for prompt in truth], LOADS["greedy"][: len(truth)])
        found.append([(one.token_ids, policy == "auto" or one.statistics.acceptance_length) for one in outputs])
    assert found[0] == found[1]
    assert engine.scheduler.speculator is not None
    assert not engine.scheduler.speculator.drafter_runner.captured, "it is a part of the step's pass"
    assert all(work.graph is not None for work in engine.scheduler.target_runner.captured.values())


@pytest.mark.parametrize("name", HEADS)
def test_a_step_with_any_head_can_be_captured(
    folders: Folders, truth: Truth, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_passes(monkeypatch)
    pair = pair_with(folders, tmp_path / "drafter", HEADS[name])
    engine = with_passes(tiny_engine(pair, width=BLOCK), static=True)
    outputs = answers(engine, [list(prompt) for prompt in truth], GREEDY)
    assert [output.token_ids for output in outputs] == list(truth.values())


def test_a_prefix_is_taken_over_from_requests_that_ran_ahead(folders: Folders, truth: Truth) -> None:
    """Their features went to the drafter from step to step; what is drafted after them is drafted as well as before."""
    prompt, answer = next(iter(truth.items()))
    found = []
    for static in (False, True):
        engine = with_passes(tiny_engine(folders, truth=truth), static=static)
        answers(engine, [list(prompt)], GREEDY)
        again = engine.scheduler.join([*prompt, *answer[:20], 5], GREEDY)
        reused = again.reused, again.injected
        while engine.scheduler.running:
            engine.scheduler.step()
        found.append((reused, again.output_ids, again.steps))
    assert found[0] == found[1]
    assert found[0][0] == (len(prompt) + 20, len(prompt) + 20)


@pytest.mark.parametrize("policy", ["off", "fixed", "auto"])
@pytest.mark.parametrize(("params", "most_calls"), [(GREEDY, 8), (SAMPLED, 140)], ids=["greedy", "sampled"])
def test_a_step_waits_once(folders: Folders, policy: str, params: SamplingParams, most_calls: int) -> None:
    """`most_calls`: PyTorch functions called by a step, of which a captured pass is one."""
    calls = {}
    for count in (1, 2, 4):
        engine = with_passes(tiny_engine(folders, width=POLICIES[policy]()), static=True)
        for n in range(count):
            engine.scheduler.join(engine.tokenize(PROMPTS[n]), params.model_copy(update={"ignore_eos": True}))
        for _ in range(4):
            engine.scheduler.step()
        steps = []
        for _ in range(4):
            with device_calls() as found:
                engine.scheduler.step()
            assert len(found.waits) <= 1, "\n".join(found.waits)
            steps.append(found.calls)
        calls[count] = min(steps)
    assert max(calls.values()) <= most_calls


def test_a_penalised_step_waits_for_drafts_and_tokens(folders: Folders) -> None:
    engine = with_passes(tiny_engine(folders), static=True)
    for prompt in PROMPTS[:3]:
        engine.scheduler.join(engine.tokenize(prompt), GREEDY.model_copy(update={"presence_penalty": 1.0}))
    for _ in range(2):
        engine.scheduler.step()
    with device_calls() as found:
        engine.scheduler.step()
    assert len(found.waits) == 2, "\n".join(found.waits)


@pytest.mark.parametrize(
    ("params", "waits"), [(GREEDY, 0), (SAMPLED, 0), (SAMPLED.model_copy(update={"top_p": 0.8}), 1)], ids=str
)
def test_a_step_is_launched_before_the_one_before_is_read(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, waits: int
) -> None:
    """Its passes are called before the host asks for tokens. To choose with `top_p` below 1 waits, but not for them."""
    engine = with_passes(tiny_engine(folders), static=True)
    monkeypatch.setattr(sampling, "_USUAL_NUCLEUS", 8)
    scheduler = engine.scheduler
    request = scheduler.join(engine.tokenize(PROMPTS[0]), params.model_copy(update={"ignore_eos": True}))
    for _ in range(3):
        scheduler.step()
    seen, blocks = [], TargetRunner.blocks

    def noted(*given: Any, **named: Any) -> Any:
        seen.append((len(request.token_ids), len(found.waits)))
        return blocks(*given, **named)

    monkeypatch.setattr(TargetRunner, "blocks", noted)
    before = len(request.token_ids)
    with device_calls() as found:
        scheduler.step()
    assert seen == [(before, waits)]
    assert len(found.waits) == waits + 1, "after the passes, the tokens alone are waited for"
    assert len(request.token_ids) > before
    assert request.injected <= request.verified


def test_a_request_that_leaves_and_one_that_joins_while_a_step_runs(folders: Folders, truth: Truth) -> None:
    scheduler = with_passes(tiny_engine(folders, truth=truth, max_batch_size=2), static=True).scheduler
    (one, right), (two, other) = list(truth.items())[:2]
    first, second = scheduler.join(list(one), GREEDY), scheduler.join(list(two), GREEDY)
    for _ in range(4):
        scheduler.step()
    scheduler.leave(first)
    third = scheduler.join(list(one), GREEDY)
    while scheduler.running:
        scheduler.step()
    assert (second.output_ids, third.output_ids) == (other, right)

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from dflash_serve import SamplingParams
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.width import AutoWidth
from tests.support.embedded import PROMPTS, answers, tiny_engine

Folders = tuple[Path, Path]
Truth = dict[tuple[int, ...], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def auto() -> AutoWidth:
    return AutoWidth(CostModel(target={1: 1.0, 16: 1.2}, draft={1: 0.1, 4: 0.2}), 4)


def test_answers_of_auto_width_do_not_depend_on_width_or_neighbours(folders: Folders, truth: Truth) -> None:
    """Of fixed widths, `test_heads` says so."""
    outputs = answers(tiny_engine(folders, width=auto(), max_batch_size=3, truth=truth), PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == list(truth.values())
    assert max(output.statistics.tokens_per_step or 0 for output in outputs) > 1.3
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, frequency_penalty=0.3)
    plain = [answers(tiny_engine(folders, width=1), [prompt], params)[0].token_ids for prompt in PROMPTS]
    engine = tiny_engine(folders, width=auto(), max_batch_size=2, truth=truth)
    assert [output.token_ids for output in answers(engine, PROMPTS, params)] == plain


def test_a_long_prompt_prefilled_in_pieces_gives_the_same_answer(folders: Folders) -> None:
    prompt = " ".join(PROMPTS)
    whole = answers(tiny_engine(folders), [prompt], GREEDY)[0].token_ids
    assert answers(tiny_engine(folders, prefill_rows=5), [prompt], GREEDY)[0].token_ids == whole


def test_a_request_that_leaves_frees_its_slot_for_the_next_step(folders: Folders) -> None:
    scheduler = tiny_engine(folders, max_batch_size=1).scheduler
    first = scheduler.join([5, 6, 7], GREEDY)
    scheduler.step()
    scheduler.leave(first)
    assert scheduler.free_entries == [0]
    second = scheduler.join([8, 9], GREEDY)
    assert [result.request for result in scheduler.step()] == [second]


def test_a_join_that_fails_half_way_leaves_its_entry_free(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = tiny_engine(folders).scheduler
    scheduler.join([5, 6, 7, 8, 9], GREEDY)
    scheduler.step()
    monkeypatch.setattr(scheduler, "_copy_prefix", Mock(side_effect=torch.OutOfMemoryError))
    before = sorted(scheduler.free_entries)
    for _ in range(2 * len(before)):
        with pytest.raises(torch.OutOfMemoryError):
            scheduler.join([5, 6, 7, 8, 10], GREEDY)
    assert sorted(scheduler.free_entries) == before


@pytest.mark.parametrize(
    ("tokens", "params", "fault"),
    [
        ([], GREEDY, "no tokens"),
        ([1] * 256, GREEDY, "256 tokens"),
        ([99999], GREEDY, "outside the vocabulary"),
        ([1], SamplingParams(logit_bias={99999: 1.0}), "logit_bias"),
    ],
)
def test_what_could_not_run_is_refused_at_the_door(
    folders: Folders, tokens: list[int], params: SamplingParams, fault: str
) -> None:
    scheduler = tiny_engine(folders).scheduler
    with pytest.raises(UserError, match=fault):
        scheduler.join(tokens, params)
    assert len(scheduler.free_entries) == 4


def test_features_do_not_pile_up_while_speculation_does_not_pay(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_torch.scheduler.BACKLOG", 8)
    scheduler = tiny_engine(folders, width=FixedWidth(1)).scheduler
    request = scheduler.join([5, 6, 7], GREEDY)
    for _ in range(20):
        scheduler.step()
        assert sum(len(rows) for rows in request.features) < 8


@pytest.mark.parametrize("width", [1, 4])
def test_logprobs_are_what_transformers_computes_whatever_the_width(folders: Folders, truth: Truth, width: int) -> None:
    from transformers import AutoModelForCausalLM

    params = GREEDY.model_copy(update={"logprobs": 2, "max_tokens": 20, "presence_penalty": 0.5, "logit_bias": {9: 4}})
    model = AutoModelForCausalLM.from_pretrained(folders[0]).eval()
    for output in answers(tiny_engine(folders, width=width, truth=truth), PROMPTS, params):
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.no_grad():
            rows = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        for entry, row in zip(output.logprobs, rows, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


class Pausing(AutoWidth):
    """Paused, or drafting at full width, as the test says."""

    paused = True

    @property
    def resting(self) -> bool:
        return self.paused

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        return [1 if self.paused else 4] * len(request_ids)


def test_a_large_batch_keeps_no_features_while_speculation_is_paused(
    folders: Folders, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_torch.scheduler.LARGE_BATCH", 2)
    engine = tiny_engine(folders, max_batch_size=3, truth=truth)
    engine.scheduler.policy = policy = Pausing(CostModel(target={1: 1.0}, draft={1: 1.0}), 4)
    prompts = [engine.tokenize(prompt) for prompt in PROMPTS[:2]]
    old = [engine.scheduler.join(prompt, GREEDY) for prompt in prompts]
    for _ in range(5):
        engine.scheduler.step()
    assert [request.features for request in old] == [[], []]

    policy.paused = False
    assert engine.scheduler._wanted_features(old) == ()  # no request can be drafted for
    new = engine.scheduler.join(prompts[0], GREEDY)
    assert new.reused == 0  # a short prefix with a gap is not reused
    while engine.scheduler.running:
        engine.scheduler.step()
    assert all(width == 1 for request in old for width, _ in request.steps)
    assert max(accepted for _, accepted in new.steps) > 0
    assert [request.output_ids for request in [*old, new]] == [*list(truth.values())[:2], next(iter(truth.values()))]


@pytest.mark.parametrize("worth", [0, 2048])
def test_a_prefix_that_all_prompts_share_leaves_newcomers_to_be_drafted_for(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    """The prefix was computed before the pause, and requests that joined in the pause keep it complete for new ones."""
    monkeypatch.setattr("dflash_torch.scheduler.LARGE_BATCH", 1)
    monkeypatch.setattr("dflash_torch.scheduler.WORTH_IN_LARGE_BATCH", worth)
    prefix = list(range(10, 50))
    scheduler = tiny_engine(folders, max_batch_size=3).scheduler
    scheduler.policy = policy = Pausing(CostModel(target={1: 1.0}, draft={1: 1.0}), 4)
    policy.paused = False
    first = scheduler.join([*prefix, 60], GREEDY)
    scheduler.step()
    policy.paused = True
    scheduler.step()
    assert (first.injected, first.draftable) == (len(prefix) + 1, False)
    meanwhile = scheduler.join([*prefix, 61, 62, 63], GREEDY)
    scheduler.step()
    assert (meanwhile.reused, meanwhile.injected, meanwhile.draftable) == (len(prefix), len(prefix), False)
    scheduler.leave(first, sound=False)
    policy.paused = False
    new = scheduler.join([*prefix, 61, 62, 64], GREEDY)
    assert (new.reused, new.draftable) == ((len(prefix), True) if worth else (len(prefix) + 2, False))
    fresh = tiny_engine(folders, reuse_prefixes=False).scheduler
    alone = fresh.join([*prefix, 61, 62, 64], GREEDY)
    for each in (scheduler, fresh):
        for _ in range(3):
            each.step()
    assert new.output_ids[:2] == alone.output_ids[:2]
    if worth:
        assert max(width for width, _ in new.steps) > 1
        assert scheduler.speculator is not None
        assert fresh.speculator is not None
        length = min(new.injected, alone.injected)
        assert length > len(prefix)
        keys = scheduler.speculator.cache.keys[:, new.entry, :, :length]
        assert (keys - fresh.speculator.cache.keys[:, alone.entry, :, :length]).abs().max() < 1e-5


@pytest.mark.parametrize(("worth", "borrows"), [(0, True), (2, True), (2048, False)])
def test_a_prefix_that_takes_long_to_compute_is_worth_more_than_drafts(
    folders: Folders, truth: Truth, monkeypatch: pytest.MonkeyPatch, worth: int, borrows: bool
) -> None:
    """The prefix of a finished request with a gap in the drafter's context is reused if it is long enough."""
    monkeypatch.setattr("dflash_torch.scheduler.LARGE_BATCH", 1)
    monkeypatch.setattr("dflash_torch.scheduler.WORTH", worth)
    engine = tiny_engine(folders, max_batch_size=3, truth=truth)
    engine.scheduler.policy = policy = Pausing(CostModel(target={1: 1.0}, draft={1: 1.0}), 4)
    prompt = engine.tokenize(PROMPTS[0])
    old = engine.scheduler.join(prompt, GREEDY)
    while engine.scheduler.running:
        engine.scheduler.step()
    policy.paused = False
    new = engine.scheduler.join(prompt, GREEDY)
    while engine.scheduler.running:
        engine.scheduler.step()
    assert (new.reused, new.draftable) == ((len(prompt) - 1, False) if borrows else (0, True))
    assert (max(width for width, _ in new.steps) == 1) is borrows
    assert new.output_ids == old.output_ids == next(iter(truth.values()))


def test_requests_of_a_small_batch_can_be_drafted_for_after_a_pause(folders: Folders, truth: Truth) -> None:
    engine = tiny_engine(folders, truth=truth)
    engine.scheduler.policy = policy = Pausing(CostModel(target={1: 1.0}, draft={1: 1.0}), 4)
    request = engine.scheduler.join(engine.tokenize(PROMPTS[0]), GREEDY)
    for _ in range(5):
        engine.scheduler.step()
    policy.paused = False
    while engine.scheduler.running:
        engine.scheduler.step()
    assert max(accepted for _, accepted in request.steps) > 0

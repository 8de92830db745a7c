from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dflash_serve import SamplingParams
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.width import AutoWidth
from dflash_torch.scheduler import Scheduler
from tests.support.embedded import PROMPTS, answers, tiny_engine

Folders = tuple[Path, Path]
Truth = dict[tuple[int, ...], list[int]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def auto() -> AutoWidth:
    return AutoWidth(CostModel(target={1: 1.0, 16: 1.2}, draft={1: 0.1, 4: 0.2}), 4)


def test_answers_of_auto_width_do_not_depend_on_width_or_neighbours(folders: Folders, truth: Truth) -> None:
    """`test_heads` tests the same for fixed widths."""
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

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        return [1 if self.paused else 4] * len(request_ids)


def pausing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, *, large: int, **engine: Any
) -> tuple[Scheduler, Pausing]:
    """A scheduler whose batches count as large from `large` requests on; speculation is paused."""
    monkeypatch.setattr("dflash_torch.scheduler.LARGE_BATCH", large)
    scheduler = tiny_engine(folders, max_batch_size=3, **engine).scheduler
    scheduler.policy = policy = Pausing(CostModel(target={1: 1.0}, draft={1: 1.0}), 4)
    return scheduler, policy


def run(scheduler: Scheduler) -> None:
    while scheduler.running:
        scheduler.step()


def test_a_large_batch_keeps_no_features_while_speculation_is_paused(
    folders: Folders, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, policy = pausing(folders, monkeypatch, large=2, truth=truth)
    old = [scheduler.join(prompt, GREEDY) for prompt in list(truth)[:2]]
    for _ in range(5):
        scheduler.step()
    assert [request.features for request in old] == [[], []]
    policy.paused = False
    new = scheduler.join(next(iter(truth)), GREEDY)
    assert new.reused == 0  # a short prefix with a gap is not reused
    run(scheduler)
    assert all(width == 1 for request in old for width, _ in request.steps)  # they cannot be drafted for
    assert max(accepted for _, accepted in new.steps) > 0
    assert [request.output_ids for request in [*old, new]] == [*list(truth.values())[:2], next(iter(truth.values()))]


@pytest.mark.parametrize("worth", [0, 2048])
def test_a_prefix_that_all_prompts_share_leaves_newcomers_to_be_drafted_for(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    """The prefix was computed before the pause, and requests that joined in the pause keep it complete for new ones."""
    monkeypatch.setattr("dflash_torch.scheduler.WORTH_IN_LARGE_BATCH", worth)
    prefix = list(range(10, 50))
    scheduler, policy = pausing(folders, monkeypatch, large=1)
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
    run(scheduler)
    assert (max(width for width, _ in new.steps) > 1) is bool(worth)
    fresh = tiny_engine(folders, reuse_prefixes=False).scheduler
    alone = fresh.join([*prefix, 61, 62, 64], GREEDY)
    run(fresh)
    assert new.output_ids == alone.output_ids


@pytest.mark.parametrize(
    ("large", "worth", "borrows"), [(1, 0, True), (1, 2, True), (1, 2048, False), (8, 2048, None)], ids=str
)
def test_requests_are_drafted_for_after_a_pause_unless_their_prefix_was_long(
    folders: Folders, truth: Truth, monkeypatch: pytest.MonkeyPatch, large: int, worth: int, borrows: bool | None
) -> None:
    """A prefix with a gap in the drafter's context is reused if it is long enough; small batches have no gaps."""
    monkeypatch.setattr("dflash_torch.scheduler.WORTH", worth)
    scheduler, policy = pausing(folders, monkeypatch, large=large, truth=truth)
    prompt, expected = next(iter(truth.items()))
    old = scheduler.join(prompt, GREEDY)
    while scheduler.running and (borrows is not None or len(old.steps) < 5):
        scheduler.step()
    policy.paused = False
    new = scheduler.join(prompt, GREEDY)
    run(scheduler)
    assert new.output_ids == old.output_ids == expected
    assert (max(width for width, _ in new.steps) == 1) is bool(borrows)
    if borrows is None:
        assert max(accepted for _, accepted in old.steps) > 0
    else:
        assert (new.reused, new.draftable) == ((len(prompt) - 1, False) if borrows else (0, True))


def test_accepted_drafts_behind_the_end_are_not_in_the_answer(folders: Folders, truth: Truth) -> None:
    """Clients derive the steps from `usage`: tokens that the answer lacks would make them too few."""
    scheduler, behind = tiny_engine(folders, width=4, truth=truth).scheduler, 0
    for prompt, expected in truth.items():
        for token in dict.fromkeys(expected[1:]):
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[token])
            request = scheduler.join(prompt, params)
            run(scheduler)
            assert len(request.output_ids) - 1 - request.accepted_in_answer == len(request.steps)
            behind += int(request.statistics.accepted or 0) - request.accepted_in_answer
    assert behind > 0

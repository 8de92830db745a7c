from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dflash_serve.adapter.counters import read_pace
from dflash_serve.common.prometheus import Scrape
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_torch.facts import FACTS
from dflash_torch.server.responses import SpeculativeDecoding
from dflash_torch.server.worker import EngineSnapshot, ServerMetrics

STEPS = [(4, 3), (4, 0), (2, 1), (1, 0), (4, 1)]


def counts() -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    for width, accepted in STEPS:
        statistics.record(width, accepted)
    return statistics


def page(**figures: Any) -> str:
    return ServerMetrics("tiny", lambda: EngineSnapshot(**figures)).render().decode()


def test_what_is_written_is_what_the_facts_read() -> None:
    written = page(cache_usage=0.5, statistics=counts(), block_size=4)
    read = FACTS.read_acceptance(Scrape(lambda _: written))
    assert read is not None
    assert dataclasses.replace(read, engine=None) == counts()
    names = dataclasses.asdict(FACTS.metrics)
    del names["path"]
    assert [name for name in names.values() if f"\n{name}" not in written] == []


def test_the_names_of_release_0_2_are_there_with_their_counts() -> None:
    samples = Scrape(lambda _: page(statistics=counts(), block_size=4)).samples()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [samples.total(f"dflash:spec_decode_{name}_total") for name in names] == [4, 10, 5]
    assert samples.by("dflash:spec_decode_width_total", "width") == {4: 3, 2: 1, 1: 1}
    assert samples.by_slot("dflash:spec_decode_num_accepted_tokens_per_pos_total", "position", first=0) == [3, 1, 1]
    assert samples.by("dflash:spec_decode_survival", "slot") == {1: 3 / 4, 2: 1 / 3, 3: 1 / 3}


def test_a_figure_that_is_not_known_is_left_out() -> None:
    samples = Scrape(lambda _: page(waiting=3)).samples()  # as while it loads
    assert samples.total(FACTS.metrics.queued) == 3
    assert samples.total(FACTS.metrics.kv_cache_usage or "") is None
    assert "spec_decode_acceptance_length{" not in page(statistics=AcceptanceStatistics(), block_size=4)


def test_acceptance_in_a_response_adds_up_step_by_step() -> None:
    shown = SpeculativeDecoding.of(counts(), 4, STEPS)
    assert (shown.num_spec_tokens, shown.num_spec_steps) == (3, 4)
    assert (shown.num_draft_tokens, shown.num_accepted_draft_tokens) == (10, 5)
    assert shown.mean_acceptance_length == pytest.approx(1 + 5 / 4)
    assert shown.draft_acceptance_rate == pytest.approx(0.5)
    assert shown.acceptance_histogram == [1, 2, 0, 1]
    assert (shown.per_step_accepted, shown.per_step_drafted) == ([3, 0, 1, 1], [3, 3, 1, 3])


def test_without_a_step_that_drafted_nothing_is_claimed() -> None:
    shown = SpeculativeDecoding.of(AcceptanceStatistics(), 4)
    assert (shown.mean_acceptance_length, shown.draft_acceptance_rate) == (None, None)
    assert shown.acceptance_histogram == [0, 0, 0, 0]
    assert shown.per_step_accepted is None


def test_the_headroom_is_the_quotient_of_two_counters() -> None:
    samples = Scrape(lambda _: page(statistics=counts(), block_size=4, pace=(90.0, 120.0))).samples()
    assert read_pace(samples) == (90, 120)
    assert read_pace(Scrape(lambda _: page(statistics=counts(), block_size=4)).samples()) == (0, 0)

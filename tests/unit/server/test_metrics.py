from __future__ import annotations

import dataclasses

import pytest

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


def test_what_is_written_is_what_the_facts_read() -> None:
    metrics = ServerMetrics("tiny")
    metrics.watch(lambda: EngineSnapshot(cache_usage=0.5, statistics=counts(), block_size=4))
    read = FACTS.read_acceptance(Scrape(lambda _: metrics.render().decode()))
    assert read is not None
    assert dataclasses.replace(read, engine=None) == counts()


def test_every_metric_that_the_facts_name_is_written() -> None:
    metrics = ServerMetrics("tiny")
    metrics.watch(lambda: EngineSnapshot(cache_usage=0.5, statistics=counts(), block_size=4))
    metrics.joined(5, 0, 0.1)
    metrics.first_tokens(3, 0.1)
    metrics.later_tokens(2, 0.1)
    metrics.ended("stop", 1.0)
    written = metrics.render().decode()
    names = dataclasses.asdict(FACTS.metrics)
    del names["path"]
    assert [name for name in names.values() if f"\n{name}" not in written] == []


def test_an_engine_that_loads_has_a_queue_and_nothing_else() -> None:
    metrics = ServerMetrics("tiny")
    metrics.watch(lambda: EngineSnapshot(waiting=3))
    samples = Scrape(lambda _: metrics.render().decode()).samples()
    assert samples.total(FACTS.metrics.queued) == 3
    assert samples.total(FACTS.metrics.kv_cache_usage or "") is None


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

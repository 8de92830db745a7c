"""One worker of several that is slower, or accepts less: it is named, and workers that are alike are not."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from dflash_serve.client.metrics import LiveFigures
from dflash_serve.client.peers import LEVEL, accepting_less, laggards, lagging
from dflash_serve.speculation.statistics import AcceptanceStatistics

NOTHING = LiveFigures(None, 2.0, None, None, None, None, None, None, None, [], None)


def counts(steps: int, accepted: int) -> AcceptanceStatistics:
    return AcceptanceStatistics(steps, 7 * steps, accepted)


def prompt(chance: random.Random, *, worse: float = 1.0) -> AcceptanceStatistics:
    """64 tokens of one answer: prompts differ in how well they are drafted, as real ones do (τ from about 2 to 5)."""
    length = worse * math.exp(chance.gauss(math.log(3.3), 0.25))
    steps = round(64 / max(1.0, length))
    return counts(steps, 64 - steps)


def named(chance: random.Random, workers: int, *, worse: float = 1.0, prompts: int = 12) -> list[str]:
    """Workers that are named; the first one accepts less by a factor."""
    asked = [
        {f"w{n}": prompt(chance, worse=worse if n == 0 else 1.0) if n == turn % workers else counts(0, 0)}
        | {f"w{n}": counts(0, 0) for n in range(workers) if n != turn % workers}
        for turn in range(prompts * workers)
        for n in [turn % workers]
    ]
    return [one.worker for one in accepting_less(asked)]


@pytest.mark.parametrize("workers", [2, 4])
def test_of_workers_that_are_alike_few_are_named(workers: int) -> None:
    """At most `LEVEL` of all looks; 1000 looks, within four standard errors."""
    chance = random.Random(0)
    false = sum(bool(named(chance, workers)) for _ in range(1000))
    assert false <= 1000 * LEVEL + 4 * math.sqrt(1000 * LEVEL)


@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_that_drafts_without_the_prompt_is_named(workers: int) -> None:
    """A prefill half without the drafter costs 30 % of τ (2.35 for 3.35)."""
    chance = random.Random(1)
    found = [named(chance, workers, worse=0.7, prompts=16) for _ in range(200)]
    assert sum(one == ["w0"] for one in found) >= 150
    assert not any("w1" in one for one in found)


def test_a_difference_that_is_small_is_not_worth_a_line() -> None:
    assert laggards({"a": [3.0] * 8, "b": [3.1] * 8}, "τ") == []
    (found,) = laggards({"a": [2.0] * 8, "b": [3.0] * 8}, "τ")
    assert str(found).startswith("a is behind its peers: τ 2.00, its peers' 3.00, 33% lower (p = ")


def test_few_samples_and_one_worker_say_nothing() -> None:
    assert laggards({"a": [2.0] * 4, "b": [3.0] * 8}, "τ") == []
    assert laggards({"a": [2.0] * 8}, "τ") == []


def interval(**workers: tuple[float | None, float]) -> LiveFigures:
    """By worker: τ, and tokens/s of a user."""
    each = {
        name: replace(NOTHING, acceptance_length=length, tokens_per_second_per_user=rate)
        for name, (length, rate) in workers.items()
    }
    return replace(NOTHING, workers=each)


def test_top_names_the_worker_that_is_slow_and_no_prefill_half() -> None:
    """A prefill half generates first tokens, and verifies nothing."""
    chance = random.Random(2)

    def rate(mean: float) -> float:
        return mean * math.exp(chance.gauss(0, 0.05))

    seen = [interval(slow=(3.3, rate(15)), other=(3.3, rate(30)), prefill=(None, rate(1))) for _ in range(40)]
    (found,) = lagging(seen)
    assert (found.worker, found.what) == ("slow", "tokens/s a user")
    assert lagging(seen[:20]) == [], "four samples of each are too few"

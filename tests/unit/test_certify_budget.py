"""A certification's estimates: the size of a verification that fits into a time."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_serve.answers.engine import Prompt
from dflash_serve.answers.prompts import read_prompt_set
from dflash_serve.certify.budget import FEWEST_PROMPTS, Speed, largest_plan
from dflash_serve.verify.amount import amount_of
from dflash_serve.verify.questions import FEWEST, MIXED, PAIRS, RULED, RULES_ALONE, SITUATIONS, VerifyPlan
from tests.house import ROOT

PROMPTS: list[Prompt] = [[{"role": "user", "content": f"{n}: " + "a question " * 20}] for n in range(12)]
CONTEXT = 4096
SPEED = Speed(alone=100.0, together=1000.0, prompts=5000.0)


def plan(**more: Any) -> VerifyPlan:
    fields = {"prompts": 8, "prompts_sha256": "", "max_tokens": 32, "samples": 0, "long_tokens": 0, "dtype": "float32"}
    return VerifyPlan.model_validate({**fields, **more})


def test_the_mixed_situations_are_a_part_of_the_work() -> None:
    greedy, sampled = (amount_of(plan(samples=samples), PROMPTS, CONTEXT) for samples in (0, FEWEST))
    likely = [case for case in MIXED if case.params.logprobs]  # compared as distributions, without penalties
    choices = sum(case.more.get("n", 1) for case in likely)
    assert sampled.generated - greedy.generated > 2 * 12 * PAIRS * choices > 10_000
    assert sampled.answers - greedy.answers > 2 * PAIRS * len(MIXED) / 2
    assert sampled.prompts - greedy.prompts > 2 * 4 * 384  # the long prompts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seconds", [1.0, 20.0, 60.0, 600.0, 6000.0])
def test_the_largest_verification_fits_into_its_time(seconds: float, dtype: str) -> None:
    least = plan(dtype=dtype)
    found = largest_plan(least, PROMPTS, CONTEXT, SPEED, seconds)
    takes = SPEED.seconds(amount_of(found, PROMPTS, CONTEXT))
    assert takes <= seconds or found == least
    assert found.prompts in range(FEWEST_PROMPTS, len(PROMPTS) + 1)
    if seconds == 6000.0:
        assert (found.samples, found.prompts) == (1024, len(PROMPTS))
        assert takes > 60.0


def test_a_slow_machine_verifies_greedy_decoding_alone() -> None:
    """64 samples of every case were planned here: the mixed situations were not counted, 40 seconds of work."""
    assert largest_plan(plan(), PROMPTS, CONTEXT, SPEED, 15.0).samples == 0


def test_the_docs_say_how_much_a_verification_asks() -> None:
    prompts, page = read_prompt_set(), (ROOT / "docs/verify.md").read_text()
    fields = {"prompts": len(prompts), "max_tokens": 128, "samples": 1024, "long_tokens": 2048}
    whole, without = (amount_of(plan(**fields, pairs=pairs), prompts, 8192) for pairs in (PAIRS, 0))
    ruled = 2 * RULED * len(SITUATIONS) * len(RULES_ALONE)
    assert f"up to {whole.answers:,} answers of {whole.generated:,} tokens" in page
    assert f"The mixed situations are {whole.answers - without.answers + ruled:,} of these answers" in page


def test_the_speed_of_few_answers_is_that_of_each() -> None:
    assert [SPEED.at(users) for users in (1, 8, 64)] == [100.0, 800.0, 1000.0]

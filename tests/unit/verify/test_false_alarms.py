"""Over 100 honest runs of the whole decision procedure, false alarms stay within the stated rate.

The answers come from the real rules: drafting by a bigram table, `count_accepted` over blocks, against plain sampling,
with penalties counted inside the block, each answer with a seed of its own. They are drawn once, 100 runs' worth; the
runs share none of them, and no two answers of a side share a seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from dflash_serve.client.endpoint import Reply, ScoredToken
from dflash_serve.common.http import RefusedError
from dflash_serve.common.store import Store
from dflash_serve.speculation.acceptance import count_accepted
from dflash_serve.speculation.noise import draw, uniforms
from dflash_serve.speculation.sampling import SamplingBatch, TokenCounts, probabilities
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify import verification
from dflash_serve.verify.questions import (
    FEW_PROMPTS,
    FIRST_SEED,
    MIXED,
    PAIRS,
    SAMPLED,
    SEEDS_A_CASE,
    WITH,
    WITHOUT,
    Case,
    Question,
    VerifyPlan,
)
from dflash_serve.verify.report import Findings
from dflash_serve.verify.subjects import SubjectPair
from dflash_serve.verify.verification import Verification

pytestmark = pytest.mark.thorough
RUNS, SAMPLES, TOKENS, VOCABULARY, WIDTH = 100, 64, 4, 16, 3
STATED, LOOSE = 1e-3, 0.2
SURE = 1e-4
"""How improbable a count of alarms must be before this test itself calls alarm; seeds are fixed, a pass stays one."""
Pools = dict[tuple[str, str], Tensor]


def drawn(case: Case, width: int, count: int, first_seed: int) -> Tensor:
    """`count` answers of TOKENS tokens, [count, TOKENS]: verified blocks of `width`, 1 = plain sampling."""
    table = bigrams()
    batch = SamplingBatch.of([case.params] * count, VOCABULARY)
    tokens = torch.full((count, 1 + TOKENS + width), -1)
    tokens[:, 0] = 0  # the prompt
    seeds, length = torch.arange(first_seed, first_seed + count), torch.zeros(count, dtype=torch.int64)
    for _ in range(TOKENS):
        block = [tokens.gather(1, length[:, None])[:, 0]]
        while len(block) < width:
            block.append(table[block[-1]].argmax(-1))
        draft = torch.stack(block[1:], 1) if width > 1 else torch.empty(count, 0, dtype=torch.int64)
        counts = TokenCounts.of(tokens[:, :1], tokens[:, 1:], VOCABULARY)
        p = probabilities(table[torch.stack(block, 1)], batch, counts, draft)
        own = draw(p, uniforms(seeds, length, width))
        accepted = count_accepted(draft, own, torch.full((count,), width - 1))[:, None]
        gained = own.masked_fill((torch.arange(width) > accepted) | (length >= TOKENS)[:, None], -1)
        place = length[:, None] + 1 + torch.arange(width)
        tokens.scatter_(1, place, torch.where(gained >= 0, gained, tokens.gather(1, place)))
        length = (length + (gained >= 0).sum(1)).clamp(max=TOKENS)
    return tokens[:, 1 : 1 + TOKENS]


class Pool:
    """A subject that answers from what was drawn; greedy answers are all alike."""

    def __init__(self, pools: Pools, name: str, run: int) -> None:
        self.pools, self.name, self.run = pools, name, run

    def answers(self, questions: Sequence[Question], *, top_logprobs: int | None = None) -> Iterator[tuple[int, Reply]]:
        for index, question in enumerate(questions):
            if question.more or question.params.seed in range(FEW_PROMPTS):
                raise RefusedError("only a server takes it", where="pool", status=400)
            yield index, Reply("", token_ids=(1, 2)) if question.params.greedy else self._sampled(question)

    def _sampled(self, question: Question) -> Reply:
        assert question.params.seed is not None
        number, sample = divmod(question.params.seed - FIRST_SEED[self.name], SEEDS_A_CASE)
        case = (*SAMPLED, *MIXED)[number]
        mixed = number >= len(SAMPLED)
        answer = self.pools[self.name, case.name][self.run * (2 * PAIRS if mixed else SAMPLES) + sample // (1 + mixed)]
        tokens = tuple(answer.tolist())
        return Reply("", tokens, scored(tokens) if mixed and question.params.logprobs else None)

    def acceptance(self) -> AcceptanceStatistics:
        return AcceptanceStatistics(1, 3, 2)

    def wrong_penalties(self) -> str | None:
        return None

    def speculates(self, probe: Question | None = None) -> bool:
        return False


def bigrams() -> Tensor:
    """Logits by the last token."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2


SCORES = bigrams().log_softmax(-1).tolist()


def scored(tokens: Sequence[int]) -> tuple[ScoredToken, ...]:
    """The tokens with the log-probabilities of the best ones."""
    each = [(SCORES[before], token) for before, token in pairwise((0, *tokens))]
    tops = [sorted(((str(n), value) for n, value in enumerate(row)), key=lambda one: -one[1])[:5] for row, _ in each]
    return tuple(ScoredToken(str(t), row[t], tuple(top)) for (row, t), top in zip(each, tops, strict=True))


@pytest.fixture(scope="module")
def pools() -> Pools:
    """The answers of all runs: those of each sampled case, and of the cases of `MIXED` that an engine takes."""
    counts = [(case, SAMPLES) for case in SAMPLED] + [(case, 2 * PAIRS) for case in MIXED if not case.more]
    return {
        (name, case.name): drawn(case, width, RUNS * count, (2 * number + side) * 10**6)
        for side, (name, width) in enumerate([(WITHOUT, 1), (WITH, WIDTH)])
        for number, (case, count) in enumerate(counts)
    }


def decide(pools: Pools, run: int, false_alarm: float, other: str = WITH) -> Findings:
    plan = VerifyPlan(
        prompts=1, prompts_sha256="", max_tokens=2, samples=SAMPLES, sample_tokens=TOKENS, false_alarm=false_alarm
    )
    sides = [Pool(pools, name, run) for name in (WITHOUT, other)]
    pair = SubjectPair(lambda: nullcontext(sides[1]), lambda: nullcontext(sides[0]))
    return Verification(plan, ["a"], pair, Store(None, {})).run()


@pytest.fixture(autouse=True)
def no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could have been seen is told after the decision and takes longer than it."""
    monkeypatch.setattr(verification, "smallest_deviation", lambda *_: None)


@pytest.mark.parametrize("false_alarm", [STATED, LOOSE])
def test_honest_runs_are_called_lossless_but_for_the_stated_rate(pools: Pools, false_alarm: float) -> None:
    alarms = 0
    for run in range(RUNS):
        found = decide(pools, run, false_alarm)
        alarms += found.verdict == "not lossless"
        assert found.verdict != "could not tell"
    assert alarms <= binom.isf(SURE, RUNS, false_alarm)


def test_the_same_procedure_sees_a_side_that_draws_otherwise(pools: Pools) -> None:
    """The pools are not so poor that nothing could be seen in them: here the second token is always the likeliest."""
    shifted = dict(pools)
    for case in SAMPLED:
        answers = pools[WITH, case.name].clone()
        answers[:, 1] = answers[:, 1].mode().values
        shifted[WITH, case.name] = answers
    assert all(decide(shifted, run, STATED).verdict == "not lossless" for run in range(10))

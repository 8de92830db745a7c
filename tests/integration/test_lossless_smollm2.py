"""Speculation changes no token: SmolLM2-135M-Instruct with the bundled drafter against plain decoding.

In float32 token for token; in bfloat16 as `dflash-serve verify` asks it, near-ties counted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import WITH_HEAD, target_folder
from dflash_serve.common.store import Store
from dflash_serve.models import layers
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.statistics import total
from dflash_serve.verify.questions import CONTINUED, VerifyPlan
from dflash_serve.verify.subjects import EngineSubject, SubjectPair
from dflash_serve.verify.verification import Verification
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.scheduler import Scheduler
from tests.support.embedded import answers
from tests.support.prompts import human_eval, word_problems

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=128)
BATCH = 20
WIDTHS = (2, 4, 8)
EVERY_WIDTH = (0, 7, 20, 25, 38)
"""Prompts that run at all widths; the others run at one, in turn."""
Answers = list[list[int]]
Plain = Callable[[int], dict[int, list[int]]]


def chosen(width: int) -> list[int]:
    """Numbers of the prompts that run at a width."""
    return [n for n in range(40) if WIDTHS[n % len(WIDTHS)] == width or n in EVERY_WIDTH]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", "smollm2", width=8, dtype="float32", max_model_len=1024, max_batch_size=BATCH)


@pytest.fixture(scope="module")
def scheduler(llm: LLM) -> Scheduler:
    engine = llm.engine
    assert isinstance(engine, EmbeddedEngine)
    return engine.scheduler


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> Answers:
    return [llm.engine.tokenize(prompt) for prompt in word_problems(20) + human_eval(20)]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: Answers) -> Plain:
    """Answers without speculation to the prompts of a width, by number."""

    @cache
    def answered(width: int) -> dict[int, list[int]]:
        numbers = chosen(width)
        outputs = answers(llm.engine.plain(), [prompts[n] for n in numbers], GREEDY)
        return {n: output.token_ids for n, output in zip(numbers, outputs, strict=True)}

    return answered


def test_plain_decoding_is_what_transformers_generates(prompts: Answers, plain: Plain) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(target_folder("smollm2"), dtype=torch.float32).eval()
    for index in (0, 25):
        ids = torch.tensor([prompts[index]])
        out = reference.generate(ids, max_new_tokens=48, do_sample=False, attention_mask=torch.ones_like(ids))
        answer = out[0, ids.shape[1] :].tolist()
        assert plain(8)[index][: len(answer)] == answer


@pytest.mark.parametrize("width", [8, *(pytest.param(width, marks=pytest.mark.thorough) for width in (2, 4))])
def test_greedy_answers_are_the_same_token_for_token(
    llm: LLM, scheduler: Scheduler, prompts: Answers, plain: Plain, width: int
) -> None:
    scheduler.policy = FixedWidth(width)
    outputs = llm.generate([prompts[n] for n in chosen(width)], GREEDY)
    assert [output.token_ids for output in outputs] == list(plain(width).values())
    assert (total(output.statistics for output in outputs).steps or 0) < sum(len(a) - 1 for a in plain(width).values())


@pytest.mark.thorough
def test_the_trained_head_changes_no_token_and_saves_steps(
    llm: LLM, scheduler: Scheduler, prompts: Answers, plain: Plain
) -> None:
    numbers = chosen(8)[:8]
    asked = [prompts[n] for n in numbers]
    scheduler.policy = FixedWidth(8)
    without = llm.generate(asked, GREEDY)
    other = LLM("smollm2", WITH_HEAD, width=8, dtype="float32", max_model_len=1024, max_batch_size=BATCH)
    outputs = other.generate(asked, GREEDY)
    assert [output.token_ids for output in outputs] == [plain(8)[n] for n in numbers]
    steps, steps_without = (total(output.statistics for output in each).steps or 0 for each in (outputs, without))
    assert steps < steps_without


def test_a_seeded_sample_is_the_same_with_any_width_and_neighbours(
    llm: LLM, scheduler: Scheduler, prompts: Answers
) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.4, seed=11, max_tokens=32)
    alone = answers(llm.engine.plain(), prompts[:3], params)
    scheduler.policy = FixedWidth(8)
    together = llm.generate(prompts[:6], params)
    assert [output.token_ids for output in alone] == [output.token_ids for output in together[:3]]


@pytest.mark.thorough
def test_in_bfloat16_answers_part_at_near_ties_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounding that depends on the number of rows, as GPUs and a CPU's matrix units have it."""
    monkeypatch.setattr(layers, "pack_linear", lambda linear, *, compiled=True: RoundedByRows(linear))
    engine = LLM("smollm2", "smollm2", width=8, dtype="bfloat16", max_model_len=512, max_batch_size=8).engine
    assert isinstance(engine, EmbeddedEngine)
    prompts, plain = word_problems(2) + human_eval(2), engine.plain()
    pair = SubjectPair(lambda: nullcontext(EngineSubject(engine)), lambda: nullcontext(EngineSubject(plain)))
    plan = VerifyPlan(prompts=4, prompts_sha256="", max_tokens=32, samples=0, long_tokens=0, dtype="bfloat16")
    found = Verification(plan, prompts, pair, Store(None, {})).run()
    assert (found.verdict, found.faults, found.reasons) == ("lossless", {}, ())
    assert {one.kind for case in (*found.greedy, *found.exact) for one in case.differences} == {"near-tie"}
    greedy, behind = found.greedy[0], next(one for one in found.exact if one.case == CONTINUED["greedy"].name)
    assert behind.compared > 0
    assert greedy.compared + behind.compared > greedy.tokens / 2
    assert (found.acceptance_length or 0) > 1.5


class RoundedByRows(nn.Linear):
    """Rounds twice if it has several rows, at a place that depends on their number.

    It multiplies in float32, so that it is as fast and rounds alike on a CPU that has no bfloat16.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.wide = linear.weight.float()
        assert linear.bias is None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        middle = 64 * (1 + rows % 5) if rows > 1 else 0
        wide = x.float()
        parts = wide[..., :middle] @ self.wide[:, :middle].T, wide[..., middle:] @ self.wide[:, middle:].T
        return parts[0].to(x.dtype) + parts[1].to(x.dtype)
